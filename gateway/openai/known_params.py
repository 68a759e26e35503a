"""Sampling parameters that were checked before: a program asks for the same ones with every
request, and looking them up takes a fifth of the time of making and checking them."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar

import msgspec

from pagemesh.gateway.openai.schema import GenerationRequest
from pagemesh.shared.messages import ModelCard
from pagemesh.shared.sampling import SamplingParams

MAX_KNOWN: Final = 1024
# What is kept holds strings of its request, so those of long bodies are not kept.
MAX_BODY_BYTES: Final = 4096
# What parameters are not made of. Everything else counts, fields of a later day too.
_APART: Final = frozenset(
    {
        *("model", "prompt", "messages", "suffix", "tools", "documents"),
        *("user", "cache_salt", "prompt_cache_key", "priority", "timeout"),
    }
)

T = TypeVar("T", bound=GenerationRequest)
Build = Callable[[T, ModelCard], SamplingParams]


class KnownParams(Generic[T]):
    """Calling it is `build(request, card)`, for requests of `kind`. Of a card only the defaults may
    count where no request brings token ids; of a seed, which is many a request's own, nothing but
    itself. The first MAX_KNOWN results are kept; then all are forgotten, and others come.
    """

    def __init__(self, kind: type[T], build: Build[T]) -> None:
        names = (name for name in kind.__struct_fields__ if name not in (*_APART, "seed"))
        self._asked: Callable[[T], tuple[Any, ...]] = attrgetter(*names)
        self._build = build
        self._known: dict[tuple[Any, ...], SamplingParams] = {}

    def for_body(self, n_bytes: int) -> Build[T]:
        """What a request with a body of so many bytes calls."""
        return self if n_bytes <= MAX_BODY_BYTES else self._build

    def __call__(self, request: T, card: ModelCard) -> SamplingParams:
        """Raises RequestError (400) naming the field at fault."""
        asked = self._asked(request), *card.defaults.items()
        try:
            known = self._known.get(asked)
        except TypeError:  # it holds a list or an object, which cannot be looked up
            return self._build(request, card)
        if known is None:
            known = self._build(msgspec.structs.replace(request, seed=None), card)
            self._keep(asked, known)
        return known if request.seed is None else known.with_seed(request.seed)

    def _keep(self, asked: tuple[Any, ...], params: SamplingParams) -> None:
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[asked] = params

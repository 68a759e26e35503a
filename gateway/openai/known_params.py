"""Sampling parameters that were checked before: a program asks for the same ones with every
request, and looking them up takes a fifth of the time of making and checking them."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar

from pagemesh.gateway.openai.schema import GenerationRequest
from pagemesh.shared.messages import ModelCard
from pagemesh.shared.sampling import SamplingParams

MAX_KNOWN: Final = 1024
# What parameters are not made of. Everything else counts, fields of a later day too.
_APART: Final = frozenset(
    {
        *("model", "prompt", "messages", "suffix", "tools", "documents"),
        *("user", "cache_salt", "prompt_cache_key", "priority", "timeout"),
    }
)

T = TypeVar("T", bound=GenerationRequest)


class KnownParams(Generic[T]):
    """Calling it is `build(request, card)`, for requests of `kind`. Of a card only the defaults may
    count where no request brings token ids. The first MAX_KNOWN results are kept; then all are
    forgotten, and others come.
    """

    def __init__(self, kind: type[T], build: Callable[[T, ModelCard], SamplingParams]) -> None:
        names = (name for name in kind.__struct_fields__ if name not in _APART)
        self._asked: Callable[[T], tuple[Any, ...]] = attrgetter(*names)
        self._build = build
        self._known: dict[tuple[Any, ...], SamplingParams] = {}

    def __call__(self, request: T, card: ModelCard) -> SamplingParams:
        """Raises RequestError (400) naming the field at fault."""
        asked = self._asked(request), *card.defaults.items()
        try:
            known = self._known.get(asked)
        except TypeError:  # it holds a list or an object, which cannot be looked up
            return self._build(request, card)
        if known is None:
            known = self._build(request, card)
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[asked] = known
        return known

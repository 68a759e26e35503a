"""Prefixes on their way: what a request may read that others compute in steps that are out.

Steps run in order, so a block that a step in flight fills is there for the next one. Requests that
arrive together with the same prefix so compute it once: the first in one step, the others read it
in the next. What was borrowed is worth what the lender's step is: if that fails, borrowers start
again (`Lifecycle.fail`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from pagemesh.scheduler_svc.inflight import InFlight
from pagemesh.scheduler_svc.prefix import Prefix
from pagemesh.scheduler_svc.request import Request, Status

_WORTH_WAITING_TOKENS: Final = 64
"""For fewer nobody waits a step."""


class _Filled(NamedTuple):
    """By whom, and how many of its blocks are full then."""

    request: Request
    n_blocks: int


class Borrowing:
    """Blocks by content that steps in flight fill, and those that the step being planned fills.
    For one plan."""

    def __init__(
        self,
        flights: Iterable[InFlight],
        chunks: Iterable[tuple[Request, int]],
        block_tokens: int,
    ) -> None:
        """`chunks` of running requests, and their tokens, are in the step being planned."""
        self._block_tokens = block_tokens
        self._lent: dict[bytes, _Filled] = {}
        self._entering: dict[bytes, _Filled] = {}
        for flight in flights:
            for request, _, _ in flight.chunks:
                if request.status is Status.RUNNING:
                    self._fill(self._lent, request, request.published, request.computed)
        for request, n_tokens in chunks:
            self.enter(request, request.computed // block_tokens, request.computed + n_tokens)

    def enter(self, request: Request, n_known: int, n_computed: int) -> None:
        """The step being planned computes the blocks of `request` from `n_known` on, up to
        `n_computed` tokens."""
        self._fill(self._entering, request, n_known, n_computed)

    def extended(self, request: Request, cached: Prefix) -> Prefix:
        """`cached` and what steps in flight add to it, one's blocks after another's."""
        blocks, lenders = list(cached.blocks), list[Request]()
        while (shared := self._shared(self._lent, request, len(blocks))) is not None:
            blocks += shared.request.blocks[len(blocks) : shared.n_blocks]
            lenders.append(shared.request)
        if not lenders:
            return cached
        return Prefix(blocks, len(blocks) * self._block_tokens, lenders=tuple(lenders))

    def pays_to_wait(self, request: Request, prefix: Prefix) -> bool:
        """Whether most of what `request` has to compute is computed by the step being planned, so
        that it can be read by the next."""
        shared = self._shared(self._entering, request, len(prefix.blocks))
        if shared is None:
            return False
        shared_tokens = (shared.n_blocks - len(prefix.blocks)) * self._block_tokens
        left_tokens = len(request.ids) - prefix.computed
        return shared_tokens >= _WORTH_WAITING_TOKENS and 2 * shared_tokens >= left_tokens

    def _fill(
        self, filled: dict[bytes, _Filled], request: Request, first: int, n_computed: int
    ) -> None:
        n_blocks = min(n_computed // self._block_tokens, len(request.hashes))
        for content in request.hashes[first:n_blocks]:
            filled.setdefault(content, _Filled(request, n_blocks))

    def _shared(
        self, filled: dict[bytes, _Filled], request: Request, n_known: int
    ) -> _Filled | None:
        """Who fills the block after `n_known`, and how many blocks the two have in common. One
        token is left to compute: its logits are needed."""
        limit = min((len(request.ids) - 1) // self._block_tokens, len(request.hashes))
        found = filled.get(request.hashes[n_known]) if n_known < limit else None
        if found is None:
            return None
        most = min(limit, found.n_blocks)
        n_blocks = _agree(request.hashes, found.request.hashes, n_known + 1, most)
        return _Filled(found.request, n_blocks)


def _agree(one: Sequence[bytes], other: Sequence[bytes], low: int, high: int) -> int:
    """How many of the first `high` hashes are equal; the first `low` are. Chained hashes that are
    equal have equal ones before them."""
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low

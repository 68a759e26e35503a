"""What was placed on an engine lately, and will be cached there before the index says so.

The memory also stands in for the index while Redis is slow or away. No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

RECENT_S: Final = 30.0
"""A prediction is as old as that at most: long enough for a queue and a prefill."""
MAX_RECENT_BLOCKS: Final = 8192
"""Remembered for an engine, or as many as it has; the oldest placements are forgotten first."""


class RecentBlocks:
    """Hashes of the blocks that one engine is about to hold. `limit_blocks`: how many it can."""

    def __init__(self, limit_blocks: int) -> None:
        self._limit = max(1, min(limit_blocks, MAX_RECENT_BLOCKS))
        self._placed_s: dict[bytes, float] = {}
        """In the order of placement, the tail of each chain first: a head is forgotten after it."""

    def __len__(self) -> int:
        return len(self._placed_s)

    def add(self, hashes: Sequence[bytes], now_s: float) -> None:
        placed_s = self._placed_s
        for content in reversed(hashes[: self._limit]):
            placed_s.pop(content, None)
            placed_s[content] = now_s
        self._forget(now_s)

    def depth(self, hashes: Sequence[bytes], now_s: float) -> int:
        """How many leading blocks of the chain are remembered: the deepest is found by halving,
        since of a chain heads outlive tails."""
        # Asked of every engine for every request.
        placed_at_s, oldest_s = self._placed_s.get, now_s - RECENT_S
        if not hashes or placed_at_s(hashes[0], -inf) < oldest_s:
            return 0
        low, high = 1, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if placed_at_s(hashes[middle - 1], -inf) >= oldest_s:
                low = middle
            else:
                high = middle - 1
        return low

    def _forget(self, now_s: float) -> None:
        over = len(self._placed_s) - self._limit
        old: list[bytes] = []
        for content, placed_s in self._placed_s.items():
            if len(old) >= over and now_s - placed_s <= RECENT_S:
                break
            old.append(content)
        for content in old:
            del self._placed_s[content]

"""How much batch work may be out beside what people wait for. Pure: no I/O, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Final

from pagemesh.shared.messages import EngineStatus

ROWS_SHARE: Final = 0.75
"""Of an engine's rows: those left are for whoever comes meanwhile."""
FULL_KV: Final = 0.85
BESIDE: Final = 4
"""Beside the requests of others, this part of the batch requests is out."""
STEADY_S: Final = 1.0
"""Engines tell of their load five times a second: what just ended still counts there for a while,
and is nobody else's request."""
QUIET_S: Final = 5.0
"""For which there must have been no others before more are out again."""
_LOOK_S: Final = 0.05


class Pace:
    """Of the engines of one model. `ours` are the requests of batches that are out there."""

    def __init__(self) -> None:
        self.ours = 0
        self._seen: deque[tuple[float, int]] = deque()
        self._others_s = -inf

    def room(self, engines: Sequence[EngineStatus], most: int, now_s: float) -> int:
        """How many more may go there, `most` at a time. None without an engine, or while the KV
        pools are nearly full."""
        if not engines or min(each.stats.kv_usage for each in engines) > FULL_KV:
            return 0
        return max(0, self._limit(engines, most, now_s) - self.ours)

    def excess(self, engines: Sequence[EngineStatus], most: int, now_s: float) -> int:
        """How many of ours are too many there."""
        return max(0, self.ours - self._limit(engines, most, now_s)) if engines else 0

    def _limit(self, engines: Sequence[EngineStatus], most: int, now_s: float) -> int:
        """One at least: it waits behind all others."""
        others = self._steady_others(engines, now_s)
        if others:
            self._others_s = now_s
        if now_s < self._others_s + QUIET_S:
            most //= BESIDE
        rows = int(ROWS_SHARE * sum(each.capacity.max_num_seqs for each in engines))
        return max(1, min(most, rows - others))

    def _steady_others(self, engines: Sequence[EngineStatus], now_s: float) -> int:
        """The fewest of the last STEADY_S."""
        busy = sum(each.stats.running + each.stats.waiting for each in engines)
        others = max(0, busy - self.ours)
        if self._seen and now_s < self._seen[-1][0] + _LOOK_S:
            at_s, before = self._seen.pop()
            self._seen.append((at_s, min(before, others)))
        else:
            self._seen.append((now_s, others))
        while self._seen[0][0] < now_s - STEADY_S:
            self._seen.popleft()
        return min(others for _, others in self._seen)

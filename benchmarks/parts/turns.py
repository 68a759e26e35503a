"""CUDA graphs timed in turns, so that clocks that drift are the same for all."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch.cuda import CUDAGraph

_SIGMAS: Final = 3.0
_LEAST_SHARE: Final = 1e-3


class Gain(NamedTuple):
    """Milliseconds that the second saves, by the median over turns, and how far that may be off."""

    before_ms: float
    ms: float
    error_ms: float

    @classmethod
    def of(cls, before: Sequence[float], after: Sequence[float]) -> Gain:
        saved = [a - b for a, b in zip(before, after, strict=True)]
        middle = statistics.median(saved)
        deviation = statistics.median(abs(each - middle) for each in saved)
        # Of a median, from the median deviation, as for normal errors.
        return cls(statistics.median(before), middle, 1.25 * 1.48 * deviation / len(saved) ** 0.5)

    @property
    def certain(self) -> bool:
        return self.ms > max(_SIGMAS * self.error_ms, _LEAST_SHARE * self.before_ms)


def replay_ms(graphs: Sequence[CUDAGraph], turns: int) -> list[list[float]]:
    """Milliseconds of each replay, by graph; the device never waits for the host."""
    n = len(graphs) * turns
    events = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
    graphs[-1].replay()
    events[0].record()
    for index in range(n):
        graphs[index % len(graphs)].replay()
        events[index + 1].record()
    events[-1].synchronize()
    times = [events[index].elapsed_time(events[index + 1]) for index in range(n)]
    return [times[index :: len(graphs)] for index in range(len(graphs))]

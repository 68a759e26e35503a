"""How long a card takes, by events on it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Final

import torch

_COPIED_BYTES: Final = 2**32
_COPIES: Final = 10
_SLEEP_CYCLES: Final = 100_000
"""Of the card before a timed graph, so that the graph is there when it is to start."""


def event_us(work: Callable[[], object]) -> float:
    """Microseconds from an event before `work` to one behind it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def graph_us(work: Callable[[], object], replays: int = 6) -> float:
    """Median microseconds of one CUDA graph of all that `work` launches."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = [_replay_us(graph) for _ in range(replays + 1)]
    return statistics.median(times[1:])


def launch_us(launches: Sequence[Callable[[], object]]) -> float:
    """Microseconds of each, all of them in one graph."""

    def work() -> None:
        for launch in launches:
            launch()

    return graph_us(work) / len(launches)


def copy_bytes_s() -> float:
    """Bytes read and written a second by a large copy, outside a graph: there it may be left to a
    copy engine."""
    source = torch.empty(_COPIED_BYTES, dtype=torch.int8, device="cuda").random_()
    target = torch.empty_like(source)
    us = min(event_us(lambda: target.copy_(source)) for _ in range(_COPIES))
    return 2 * source.nbytes / us * 1e6


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    torch.cuda._sleep(_SLEEP_CYCLES)
    return event_us(graph.replay)

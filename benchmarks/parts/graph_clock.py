"""The CUDA graphs that a piece of code launches, and how long they take alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor
from torch.cuda import CUDAGraph

from parts.card_clock import event_us

_WARM_UP_REPLAYS = 3
_REPLAYS = 20


@contextmanager
def replayed_graphs() -> Iterator[list[CUDAGraph]]:
    """Those that this process replays within the block, in order."""
    graphs: list[CUDAGraph] = []
    replay = CUDAGraph.replay

    def noted_replay(graph: CUDAGraph) -> None:
        graphs.append(graph)
        replay(graph)

    with patch.object(CUDAGraph, "replay", noted_replay):
        yield graphs


@torch.inference_mode()
def alone_ms(graphs: list[CUDAGraph], state: Tensor) -> float | None:
    """Milliseconds of all of them, launched one after the other so that the device never waits for
    the host; None if there are none. `state` is what they move on from run to run; it stays as it
    was."""
    if not graphs:
        return None
    kept = state.clone()
    _replay(graphs, _WARM_UP_REPLAYS)
    us = event_us(lambda: _replay(graphs, _REPLAYS))
    state.copy_(kept)
    return us / 1e3 / _REPLAYS


def _replay(graphs: list[CUDAGraph], times: int) -> None:
    for graph in graphs * times:
        graph.replay()

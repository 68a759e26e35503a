"""Decode steps as CUDA graphs: one launch instead of some three hundred.

A graph computes `size` rows of one token each; a batch of fewer rows is padded to the next size
with rows of no sequence. Everything a graph reads lies in buffers that stay where they are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Final

import torch

Launch = Callable[[int], None]
"""Launches one decode step of that many rows."""

# Measured on an H200: the linear layers' tiles hold 16, 32, 64, 128 or 256 rows, so that a step
# hardly gets dearer between these, and padding rows cost the other kernels next to nothing.
_SIZES: Final = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256)
_STEP_BEYOND: Final = 64


def graph_sizes(max_rows: int) -> list[int]:
    """The sizes below `max_rows` that are worth a graph, and `max_rows`."""
    beyond = range(_SIZES[-1] + _STEP_BEYOND, max_rows, _STEP_BEYOND)
    return [*(size for size in (*_SIZES, *beyond) if size < max_rows), max_rows]


class DecodeGraphs:
    """Owner of the graphs and of their memory, which all of them share: only one runs at a time."""

    def __init__(self, launch: Launch, max_rows: int) -> None:
        """`launch` must be capturable once it has run; it is given sizes up to `max_rows`."""
        self._launch = launch
        self._sizes = graph_sizes(max_rows)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._memory = torch.cuda.graph_pool_handle()

    @property
    def hot_sizes(self) -> list[int]:
        """Those to capture before requests come. Larger batches are rarer, and their steps long
        beside a capture."""
        return [size for size in self._sizes if size <= _SIZES[-1]]

    def size_for(self, n_rows: int) -> int:
        """The smallest size that holds `n_rows`, which must be at most the largest."""
        return self._sizes[bisect_left(self._sizes, n_rows)]

    def capture(self, sizes: list[int]) -> None:
        """Largest first, so that the smaller ones find the memory they need already there. Each is
        launched once before."""
        for size in sorted(sizes, reverse=True):
            self._capture(size)

    def holds(self, size: int) -> bool:
        return size in self._graphs

    def replay(self, size: int) -> None:
        """Launch the graph of `size`, which must have been captured, on the current stream."""
        self._graphs[size].replay()

    def _capture(self, size: int) -> None:
        # Once outside: a kernel may have to be compiled or a library to be set up first.
        self._launch(size)
        graph = torch.cuda.CUDAGraph()
        # Other threads may copy results meanwhile, which the default mode forbids.
        with torch.cuda.graph(
            graph,
            pool=self._memory,
            stream=torch.cuda.current_stream(),
            capture_error_mode="thread_local",
        ):
            self._launch(size)
        self._graphs[size] = graph

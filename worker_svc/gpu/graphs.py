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

_FINE: Final = (1, 2, 4)
_LARGEST_STEP: Final = 32


def graph_sizes(max_rows: int) -> list[int]:
    """1, 2, 4, then steps that stay within an eighth of the size: 8, 16, 24 … 128, 144 … 256."""
    sizes, size = [n for n in _FINE if n < max_rows], 8
    while size < max_rows:
        sizes.append(size)
        size += min(max(8, size // 128 * 16), _LARGEST_STEP)
    return [*sizes, max_rows]


class DecodeGraphs:
    """Owner of the graphs and of their memory, which all of them share: only one runs at a time."""

    def __init__(self, launch: Launch, max_rows: int) -> None:
        """`launch` must be capturable once it has run; it is given sizes up to `max_rows`."""
        self._launch = launch
        self._sizes = graph_sizes(max_rows)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._memory = torch.cuda.graph_pool_handle()

    @property
    def sizes(self) -> list[int]:
        return list(self._sizes)

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

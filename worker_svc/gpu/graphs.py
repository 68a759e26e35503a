"""Steps as CUDA graphs: one launch instead of some three hundred.

A graph computes a step of `size` rows or tokens; one of fewer is padded to the next size. What a
graph reads lies in buffers that stay where they are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

OfSize = Callable[[int], None]

# Measured on an H200: the linear layers' tiles hold 16, 32, 64, 128 or 256 rows, so that a step
# hardly gets dearer between these, and padding rows cost the other kernels next to nothing.
_DECODE_SIZES: Final = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256)
_DECODE_STEP: Final = 64
# Beyond 256 tokens cuBLAS computes in tiles of 128 or 256, and prompts have a size every 128. The
# largest is where a step of a small model takes the device as long as the host needs to launch it.
_PROMPT_SIZES: Final = (16, 32, 64, 128, 192, 256)
_PROMPT_STEP: Final = 128
_MOST_PROMPT_TOKENS: Final = 1024
_HOT: Final = 1024


def decode_sizes(max_rows: int) -> list[int]:
    """Rows: the sizes below `max_rows` that are worth a graph, and `max_rows`."""
    return [*_up_to(_DECODE_SIZES, _DECODE_STEP, max_rows - 1), max_rows]


def prompt_sizes(max_tokens: int) -> list[int]:
    """Tokens of steps with prompts, up to what a step may have."""
    return _up_to(_PROMPT_SIZES, _PROMPT_STEP, min(max_tokens, _MOST_PROMPT_TOKENS))


def _up_to(sizes: Sequence[int], step: int, most: int) -> list[int]:
    """`sizes`, and on from the last in steps."""
    return [size for size in (*sizes, *range(sizes[-1] + step, most + 1, step)) if size <= most]


class StepGraphs:
    """Owner of the graphs of one kind of step. They may share their memory with those of another:
    only one runs at a time."""

    def __init__(
        self, launch: OfSize, place_padding: OfSize, sizes: list[int], memory: Any
    ) -> None:
        """`launch` launches a step of a size, and must be capturable once it has run; before it
        does, `place_padding` brings a step of no sequence to where it reads. `memory` is a
        graph_pool_handle."""
        self._launch = launch
        self._place_padding = place_padding
        self._sizes = sizes
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._memory = memory

    @property
    def hot_sizes(self) -> list[int]:
        """Those to capture before requests come. Larger ones are rarer, and their steps long beside
        a capture."""
        return [size for size in self._sizes if size <= _HOT]

    @property
    def largest(self) -> int:
        """0 without any."""
        return self._sizes[-1] if self._sizes else 0

    def size_for(self, n: int) -> int:
        """The smallest size that holds `n`, which must be at most the largest."""
        return self._sizes[bisect_left(self._sizes, n)]

    def capture_hot(self) -> None:
        """Largest first, so that the smaller ones find the memory they need already there."""
        for size in reversed(self.hot_sizes):
            self.capture(size)

    def launch_hot(self) -> None:
        """What `capture_hot` captures, without graphs."""
        for size in self.hot_sizes:
            self._launch_padding(size)

    def hold(self, n: int) -> int:
        """The size of a graph for `n`, which is captured now unless it has been."""
        size = self.size_for(n)
        if size not in self._graphs:
            self.capture(size)
        return size

    def replay(self, size: int) -> None:
        """Launch the graph of `size`, which must have been captured, on the current stream."""
        self._graphs[size].replay()

    def capture(self, size: int) -> None:
        # Once outside: a kernel may have to be compiled or a library to be set up first.
        self._launch_padding(size)
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

    def _launch_padding(self, size: int) -> None:
        self._place_padding(size)
        self._launch(size)

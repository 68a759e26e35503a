"""The rows of decode steps on the device, which one step leaves as the next one needs them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagemesh.kernels.batch import ROW_WORDS
from pagemesh.worker_svc.batch import Ints, Rows, WireInts
from pagemesh.worker_svc.gpu.staging import pinned
from pagemesh.worker_svc.gpu.step_words import PADDING


class _Left(NamedTuple):
    """What a decode step that was launched leaves in the first rows of `size`: the next positions
    of `slots`."""

    size: int
    slots: Ints
    starts: Ints


class DecodeRows:
    """int32[slots, 4] as `kernels.batch.gather_rows` takes and moves on, one token each."""

    def __init__(self, n_slots: int, device: torch.device) -> None:
        self._padding = torch.from_numpy(_padding_rows(n_slots)).to(device)
        self._rows = self._padding.clone()
        self._left: _Left | None = None

    def first(self, size: int) -> Tensor:
        return self._rows[:size]

    def place(self, rows: Rows, size: int) -> None:
        """Bring `rows` to the device, unless a step has just left them there."""
        left = self._left
        self._left = None  # until the step is launched: it may fail before it moves the rows on
        if left is None or not _follows(rows, size, left):
            source, words = pinned(size * ROW_WORDS)
            packed = words.reshape(size, ROW_WORDS)
            packed[:] = _padding_rows(size)
            packed[: len(rows), 0], packed[: len(rows), 1] = rows.slots, rows.starts
            self._rows[:size].view(-1).copy_(source, non_blocking=True)

    def place_padding(self, size: int) -> None:
        """Rows of no sequence."""
        self._rows[:size].copy_(self._padding[:size])
        self._left = None

    def launched(self, rows: Rows, size: int) -> None:
        """A step of `rows`, which are moved on now."""
        self._left = _Left(size, rows.slots, rows.starts + 1)


def _follows(rows: Rows, size: int, left: _Left) -> bool:
    """Whether `rows` are one token each of the slots that a step of `size` rows left behind."""
    return (
        left.size == size
        and np.array_equal(left.slots, rows.slots)
        and np.array_equal(left.starts, rows.starts)
    )


def _padding_rows(n: int) -> WireInts:
    rows = np.zeros((n, ROW_WORDS), np.int32)
    rows[:, 0], rows[:, 2], rows[:, 3] = PADDING, 1, np.arange(n)
    return rows

"""What a step with prompt tokens brings to the device, in one copy to a place that stays: a graph
may read it."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from pagemesh.kernels.batch import ROW_WORDS
from pagemesh.worker_svc.batch import Ints, Rows
from pagemesh.worker_svc.gpu.staging import Words, pinned

PADDING: Final = -1
"""The slot of a row of no sequence."""


class StepWords:
    """rows int32[slots + 1, 4] (see `kernels.batch.gather_rows`): those of the step, one that holds
    its padding tokens, and others without tokens; counts int32[2] as in `AttentionInputs`."""

    def __init__(self, n_slots: int, device: torch.device) -> None:
        n_row_words = (n_slots + 1) * ROW_WORDS
        self._words = torch.zeros(n_row_words + 2 + 2 * n_slots, dtype=torch.int32, device=device)
        self.rows = self._words[:n_row_words].view(-1, ROW_WORDS)
        self.counts = self._words[n_row_words : n_row_words + 2]
        self._samples = self._words[n_row_words + 2 :].view(2, n_slots)

    def place(self, rows: Rows, n_decode: int, size: int) -> tuple[Tensor, Tensor]:
        """For a step padded to `size` tokens. Returns int32[S] each: the rows that sample, and
        their last tokens in the packed step."""
        n, ends = len(rows), np.cumsum(rows.n_tokens)
        sampling = np.flatnonzero(rows.samples)
        source, words = pinned(len(self._words))
        packed, counts, samples = self._parts(words)
        fill_padding(packed, n, int(ends[-1]), size)
        for column, values in enumerate((rows.slots, rows.starts, rows.n_tokens, ends)):
            packed[:n, column] = values
        packed[:n, 3] -= packed[:n, 2]
        counts[:] = n + 1, n_decode
        samples[:, : len(sampling)] = sampling, ends[sampling] - 1
        self._words.copy_(source, non_blocking=True)
        which, last = self._samples[:, : len(sampling)]
        return which, last

    def place_padding(self, size: int) -> None:
        """A step of no sequence."""
        source, words = pinned(len(self._words))
        packed, counts, _ = self._parts(words)
        fill_padding(packed, 0, 0, size)
        counts[:] = 1, 0
        self._words.copy_(source, non_blocking=True)

    def _parts(self, words: Words) -> tuple[Words, Words, Words]:
        n_row_words = len(self.rows) * ROW_WORDS
        rows, counts, samples = np.split(words, [n_row_words, n_row_words + 2])
        return rows.reshape(-1, ROW_WORDS), counts, samples.reshape(2, -1)


def fill_padding(rows: Words, n: int, n_tokens: int, size: int) -> None:
    """After `n` rows of `n_tokens` tokens: one with what is left of `size`, then empty ones."""
    rows[n:] = PADDING, 0, 0, size
    rows[n, 2:] = size - n_tokens, n_tokens


def count_decodes(n_tokens: Ints) -> int:
    """Rows before the first that has more than one token."""
    longer = np.flatnonzero(n_tokens != 1)
    return int(longer[0]) if len(longer) else len(n_tokens)

"""From the host to the device without waiting: what a step brings travels in pinned memory that
nothing else will write. PyTorch's pinned allocator takes it back once the copy is done."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemesh.kernels.batch import WRITE_WORDS, BatchState
from pagemesh.kernels.gpu.batch import scatter_writes
from pagemesh.worker_svc.batch import Ints

TOKEN_IDS: Final = BatchState._fields.index("token_ids")
TABLES: Final = BatchState._fields.index("tables")
PARAMS: Final = BatchState._fields.index("params")

Words = NDArray[np.int32]


def pinned(n_words: int) -> tuple[Tensor, Words]:
    """Fresh int32 words, as a tensor to copy from and an array to fill."""
    tensor = torch.empty(n_words, dtype=torch.int32, pin_memory=True)
    return tensor, tensor.numpy()


class StagedWrites:
    """Writes into the batch's state, collected until the next step applies them in one launch.

    They are made in no order, so none may overlap another, but for one to the same place, which
    replaces it: what was to be written for a request that left is dropped before the next enters.
    """

    def __init__(self, state: BatchState) -> None:
        self._state = state
        self._widths = [field.shape[1] for field in state]
        self._writes: dict[tuple[int, int], Words] = {}

    def add(self, field: int, slot: int, column: int, values: Words) -> None:
        self._writes[field, slot * self._widths[field] + column] = values

    def drop(self, slots: Ints) -> None:
        """Forget the writes to `slots`, which were left."""
        if self._writes:
            left = set(slots.tolist())
            self._writes = {
                (field, first): values
                for (field, first), values in self._writes.items()
                if first // self._widths[field] not in left
            }

    def clear(self) -> None:
        self._writes.clear()

    def flush(self) -> None:
        """Launch the writes on the current stream."""
        if self._writes:
            words = self._pack().to(self._state.token_ids.device, non_blocking=True)
            scatter_writes(words, len(self._writes), self._state)
            self._writes.clear()

    def _pack(self) -> Tensor:
        n, values = len(self._writes), list(self._writes.values())
        sizes = np.fromiter(map(len, values), np.int64, n)
        sources = np.concatenate(([0], sizes.cumsum())) + n * WRITE_WORDS
        tensor, words = pinned(int(sources[-1]))
        header = words[: n * WRITE_WORDS].reshape(n, WRITE_WORDS)
        header[:, :2] = list(self._writes)
        header[:, 2], header[:, 3] = sources[:-1], sizes
        np.concatenate(values, out=words[n * WRITE_WORDS :])
        return tensor

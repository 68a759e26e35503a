"""Pooling prompts: one vector for each, of the hidden states behind the model's last norm.

What a prompt's chunks add up to stays on the device until the last of them; only then does a vector
go to the host, where it is cut and scaled.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemesh.shared.engine_messages import NewRow
from pagemesh.shared.pooling import PoolingParams
from pagemesh.worker_svc.batch import BadStep, Ints, Rows

_SMALLEST: Final = 1e-12
"""Shorter vectors are not scaled to length 1."""


class PooledRow(NamedTuple):
    """The whole prompt of a row: the sum of `n_summed` hidden states, [H]. `row` is its place in
    the batch that was computed."""

    row: int
    total: Tensor
    n_summed: int
    params: PoolingParams

    def vector(self) -> NDArray[np.float32]:
        """float32[dimensions], once `total` is in the host's memory."""
        vector = self.total.numpy()[: self.params.dimensions].astype(np.float64) / self.n_summed
        if self.params.normalize:
            vector /= max(float(np.linalg.norm(vector)), _SMALLEST)
        return vector.astype(np.float32)


class Pooler:
    """Owner of the sums, by slot, of prompts whose mean is wanted: float64[H] on the device, so
    that how a prompt was cut into chunks hardly shows.

    A step may be computed again until it is committed: `pool` adds to no sum that counts.
    """

    def __init__(self) -> None:
        self._params: dict[int, PoolingParams] = {}
        self._sums: dict[int, Tensor] = {}
        self._sums_after: dict[int, Tensor] = {}
        """Those of the rows that were pooled last."""

    def enter(self, row: NewRow) -> None:
        """Raises BadStep for a mean of which some states can no longer be had."""
        if row.pooling is None:
            return
        if row.pooling.reads_all and row.computed > 0:
            raise BadStep(f"the mean of slot {row.slot} begins at token {row.computed}")
        self._params[row.slot] = row.pooling

    def leave(self, slots: Ints) -> None:
        if self._params:
            for slot in slots.tolist():
                self._params.pop(slot, None)
                self._sums.pop(slot, None)

    def clear(self) -> None:
        self._params.clear()
        self._sums.clear()

    def wants(self, rows: Rows) -> bool:
        """Whether the hidden states of some of `rows` are needed."""
        return bool(self._params) and not self._params.keys().isdisjoint(rows.slots.tolist())

    def pool(self, rows: Rows, hidden: Tensor) -> list[PooledRow]:
        """The prompts that end with this step; `hidden` [T, H] are the states of its tokens."""
        self._sums_after = {}
        pooled = []
        for row, end in enumerate(np.cumsum(rows.n_tokens).tolist()):
            slot, n_tokens = int(rows.slots[row]), int(rows.n_tokens[row])
            params = self._params.get(slot)
            if params is not None:
                states = hidden[end - n_tokens : end]
                total = self._sum(slot, states) if params.reads_all else _last(states)
                if rows.samples[row]:
                    n_summed = int(rows.starts[row]) + n_tokens if params.reads_all else 1
                    pooled.append(PooledRow(row, total, n_summed, params))
        return pooled

    def commit(self, slots: Ints) -> None:
        """What was pooled last counts, but for slots other than these: theirs was a try that failed
        and is computed again."""
        if self._sums_after:
            after, self._sums_after = self._sums_after, {}
            self._sums |= {slot: after[slot] for slot in slots.tolist() if slot in after}

    def _sum(self, slot: int, states: Tensor) -> Tensor:
        total = states.sum(0, dtype=torch.float64)
        before = self._sums.get(slot)
        self._sums_after[slot] = total if before is None else total.add_(before)
        return self._sums_after[slot]


def _last(states: Tensor) -> Tensor:
    """A copy: the next step overwrites the states."""
    return states[-1].to(torch.float32, copy=True)

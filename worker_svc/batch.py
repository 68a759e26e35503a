"""The persistent batch: what the worker knows of each running request, by row slot.

These are the books of the host: counts and block tables, which follow from the steps alone, so a
step may be staged before the tokens of the one before it are known. Token ids and sampling state
belong to the executor, on its device.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagemesh.kernels.cpu.staging import (
    FEW_BLOCKS,
    FITS,
    NO_TOKENS,
    NOT_KNOWN,
    NOT_LIVE,
    TWICE,
    Slots,
    admit_rows,
)
from pagemesh.shared.engine_messages import NewRow, Step
from pagemesh.shared.ledger import Ledger
from pagemesh.shared.step_rows import RowTable, StepRows

Ints = NDArray[np.int64]
WireInts = NDArray[np.int32]
WIRE_INT: Final = np.dtype("<i4")


_MISFITS: Final = {
    NO_TOKENS: "every row of a step must compute tokens",
    NOT_LIVE: "a row of the step is in no slot",
    TWICE: "a slot stands twice in the step",
    NOT_KNOWN: "a row computes tokens that are not known, or past the longest length",
    FEW_BLOCKS: "a row has too few blocks",
}


class BadStep(ValueError):
    """A step contradicts the batch: its sender and this worker disagree about the rows."""


def unpack(data: bytes) -> Ints:
    """Packed wire integers as int64[N]."""
    return np.frombuffer(data, WIRE_INT).astype(np.int64)


class _Packed(NamedTuple):
    """A table of rows as arrays: their places in the step, slots and tokens."""

    table: RowTable
    places: Ints
    slots: Ints
    n_tokens: Ints


def _packed(table: RowTable) -> _Packed:
    slots, n_tokens = (np.frombuffer(part, np.int32).astype(np.int64) for part in table)
    return _Packed(table, np.arange(len(slots)), slots, n_tokens)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one step, one entry each: place in the step, slot, tokens to compute, the position of
    the first of them, and whether the row samples a token when they are computed."""

    index: Ints
    slots: Ints
    n_tokens: Ints
    starts: Ints
    samples: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.slots)

    def part(self, which: slice) -> Rows:
        return Rows(
            self.index[which],
            self.slots[which],
            self.n_tokens[which],
            self.starts[which],
            self.samples[which],
        )

    def halves(self) -> Iterator[Rows]:
        """Two parts of the rows, or of the tokens of a single row; the same if it has one."""
        middle = len(self) // 2
        if middle:
            yield self.part(slice(None, middle))
            yield self.part(slice(middle, None))
        else:
            first = self.n_tokens // 2
            yield replace(self, n_tokens=first, samples=np.zeros_like(self.samples))
            yield replace(self, n_tokens=self.n_tokens - first, starts=self.starts + first)


class Batch:
    """State of `max_num_seqs` slots. Raises BadStep for a step that does not fit it."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        vocab_tokens: int,
        block_tokens: int,
        num_blocks: int,
    ) -> None:
        self._vocab_tokens = vocab_tokens
        self.block_tokens = block_tokens
        self._num_blocks = num_blocks
        self._step_rows = StepRows()
        self._live = np.zeros(max_num_seqs, np.bool_)
        self._entered = self._left = self._dropped = 0
        self._marks = np.zeros(max_num_seqs, np.int64)
        self.known = np.zeros(max_num_seqs, np.int64)
        self.computed = np.zeros(max_num_seqs, np.int64)
        self.n_prompt = np.zeros(max_num_seqs, np.int64)
        self._request_ids = np.full(max_num_seqs, "", np.object_)
        self._n_blocks = np.zeros(max_num_seqs, np.int64)
        self._slots = Slots(self._live, self.known, self.computed, self._n_blocks, self._marks)
        self._packed = _packed(RowTable(array("i"), array("i")))
        self.tables = np.zeros((max_num_seqs, -(-max_model_len // block_tokens)), np.int32)
        """Block ids by slot, in order of position."""
        # One token more than a request may have: a prompt of full length that is only scored still
        # samples a token, which nobody reads.
        self.row_tokens = max_model_len + 1

    @property
    def max_num_seqs(self) -> int:
        return len(self._live)

    @property
    def live_rows(self) -> int:
        return int(self._live.sum())

    @property
    def live_slots(self) -> Ints:
        return np.flatnonzero(self._live)

    def ledger(self) -> Ledger:
        """Of rows, one for each time a request entered a slot. A scheduler says that a row is over,
        not why: to a worker it is completed, unless the scheduler is lost before."""
        return Ledger(
            received=self._entered,
            completed=self._left,
            moved=self._dropped,
            in_flight=self.live_rows,
        )

    def clear(self) -> None:
        self._step_rows.clear()
        self._dropped += self.live_rows
        self._live[:] = False

    # -- diffs ------------------------------------------------------------------------------------

    def blocks_of(self, slot: int) -> WireInts:
        """The block table of a row, also after it has left, until another enters its slot."""
        return self.tables[slot, : self._n_blocks[slot]]

    def leave(self, slots: Ints) -> None:
        if not self._are_live(slots):
            raise BadStep("a row leaves a slot that is empty")
        self._live[slots] = False
        self._left += len(slots)

    def enter(self, row: NewRow) -> WireInts:
        """The ids of all its known tokens."""
        ids = np.frombuffer(row.ids, WIRE_INT)
        if not 0 <= row.slot < len(self._live) or self._live[row.slot]:
            raise BadStep(f"slot {row.slot} is taken or none")
        if not 0 <= row.computed < len(ids) < self.row_tokens:
            raise BadStep(f"{row.computed} of {len(ids)} tokens computed in slot {row.slot}")
        if not ((ids >= 0) & (ids < self._vocab_tokens)).all():  # kernels check no bounds
            raise BadStep(f"slot {row.slot} has a token that is not in the vocabulary")
        self._live[row.slot] = True
        self._entered += 1
        self.known[row.slot] = len(ids)
        self.computed[row.slot] = row.computed
        self.n_prompt[row.slot] = row.n_prompt
        self._request_ids[row.slot] = row.request_id
        self._set_blocks(row.slot, np.frombuffer(row.blocks, WIRE_INT))
        return ids

    def _set_blocks(self, slot: int, blocks: WireInts) -> None:
        if len(blocks) > self.tables.shape[1] or not self._in_pool(blocks):
            raise BadStep(f"blocks of slot {slot} lie outside the pool or its table")
        self.tables[slot, : len(blocks)] = blocks
        self._n_blocks[slot] = len(blocks)

    def grow(self, grown: Ints) -> Ints:
        """Append a block to the table of each slot; `grown` is int64[N, 2], (slot, block). Returns
        where they stand in their tables, int64[N]."""
        slots, blocks = grown.T
        if not self._are_live(slots):
            raise BadStep("a block for a slot that is empty")
        if not self._in_pool(blocks) or (self._n_blocks[slots] == self.tables.shape[1]).any():
            raise BadStep("a new block lies outside the pool or the table")
        self._require_distinct(slots)
        columns: Ints = self._n_blocks[slots]
        self.tables[slots, columns] = blocks
        self._n_blocks[slots] = columns + 1
        return columns

    def request_ids(self, slots: Ints) -> NDArray[np.object_]:
        """Names of the requests in `slots`, str[N], for the log."""
        names: NDArray[np.object_] = self._request_ids[slots]
        return names

    def _in_pool(self, blocks: NDArray[Any]) -> bool:
        return bool(((blocks > 0) & (blocks < self._num_blocks)).all())

    def _are_live(self, slots: Ints) -> bool:
        in_range = bool(((slots >= 0) & (slots < len(self._live))).all())
        return in_range and bool(self._live[slots].all())

    # -- steps ------------------------------------------------------------------------------------

    def rows(self, step: Step) -> Rows:
        """The rows that `step` computes, once its diffs are applied."""
        table = self._step_rows.follow(step)
        if table is not self._packed.table:
            self._packed = _packed(table)
        _, index, slots, n_tokens = self._packed
        starts, samples = np.empty_like(slots), np.empty(len(slots), np.bool_)
        most, block_tokens = self.row_tokens - 1, self.block_tokens
        found = admit_rows(slots, n_tokens, self._slots, most, block_tokens, starts, samples)
        if found != FITS:
            raise BadStep(_MISFITS[found])
        return Rows(index, slots, n_tokens, starts, samples)

    def _require_distinct(self, slots: Ints) -> None:
        # A slot standing twice keeps the mark of one place only.
        places = np.arange(len(slots))
        self._marks[slots] = places
        if (self._marks[slots] != places).any():
            raise BadStep("a slot stands twice in the step")

    def commit(self, rows: Rows) -> None:
        """Count what `rows` computed, and the token of each row that samples."""
        self.known[rows.slots[rows.samples]] += 1
        self.computed[rows.slots] = rows.starts + rows.n_tokens

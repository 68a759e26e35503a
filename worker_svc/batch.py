"""The persistent batch: what the worker knows of each running request, by row slot.

State and step inputs never share buffers. Counts and block tables are host arrays, since they
follow from the steps alone; token ids live on the device, where sampled tokens are written without
the host reading them, so a step may be staged before the tokens of the one before it are known.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemesh.kernels.cpu.staging import (
    FEW_BLOCKS,
    FITS,
    NO_TOKENS,
    NOT_KNOWN,
    NOT_LIVE,
    TWICE,
    Inputs,
    Slots,
    admit_rows,
    lay_out,
)
from pagemesh.kernels.inputs import AttentionInputs
from pagemesh.shared.engine_messages import NewRow, Step
from pagemesh.shared.step_rows import StepRows

Ints = NDArray[np.int64]
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


def _as_ints(values: array[int]) -> Ints:
    return np.frombuffer(values, np.int32).astype(np.int64)


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
        middle = len(self) // 2
        yield self.part(slice(None, middle))
        yield self.part(slice(middle, None))


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the model reads for some rows: int64[T] token ids and positions, and the attention's."""

    token_ids: Tensor
    positions: Tensor
    attention: AttentionInputs


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
        device: torch.device,
    ) -> None:
        self._vocab_tokens = vocab_tokens
        self._block_tokens = block_tokens
        self._num_blocks = num_blocks
        self._device = device
        self._step_rows = StepRows()
        self._live = np.zeros(max_num_seqs, np.bool_)
        self._marks = np.zeros(max_num_seqs, np.int64)
        self.known = np.zeros(max_num_seqs, np.int64)
        self.computed = np.zeros(max_num_seqs, np.int64)
        self.n_prompt = np.zeros(max_num_seqs, np.int64)
        self._request_ids = [""] * max_num_seqs
        self._n_blocks = np.zeros(max_num_seqs, np.int64)
        self._blocks = np.zeros((max_num_seqs, -(-max_model_len // block_tokens)), np.int32)
        # One column more than a request may have: a prompt of full length that is only scored still
        # samples a token, which nobody reads. Not zeroed, so untouched pages cost no memory.
        self._row_tokens = max_model_len + 1
        self._token_ids = torch.empty(
            max_num_seqs * self._row_tokens, dtype=torch.int32, device=device
        )

    @property
    def live_rows(self) -> int:
        return int(self._live.sum())

    def clear(self) -> None:
        self._step_rows.clear()
        self._live[:] = False

    # -- diffs ------------------------------------------------------------------------------------

    def leave(self, slots: Ints) -> None:
        if not self._are_live(slots):
            raise BadStep("a row leaves a slot that is empty")
        self._live[slots] = False

    def enter(self, row: NewRow) -> None:
        ids = np.frombuffer(row.ids, WIRE_INT)
        if not 0 <= row.slot < len(self._live) or self._live[row.slot]:
            raise BadStep(f"slot {row.slot} is taken or none")
        if not 0 <= row.computed < len(ids) < self._row_tokens:
            raise BadStep(f"{row.computed} of {len(ids)} tokens computed in slot {row.slot}")
        if not ((ids >= 0) & (ids < self._vocab_tokens)).all():  # kernels check no bounds
            raise BadStep(f"slot {row.slot} has a token that is not in the vocabulary")
        self._live[row.slot] = True
        self.known[row.slot] = len(ids)
        self.computed[row.slot] = row.computed
        self.n_prompt[row.slot] = row.n_prompt
        self._request_ids[row.slot] = row.request_id
        self._set_blocks(row.slot, np.frombuffer(row.blocks, WIRE_INT))
        first = row.slot * self._row_tokens
        self._token_ids[first : first + len(ids)] = torch.from_numpy(ids.copy())

    def _set_blocks(self, slot: int, blocks: NDArray[np.int32]) -> None:
        if len(blocks) > self._blocks.shape[1] or not self._in_pool(blocks):
            raise BadStep(f"blocks of slot {slot} lie outside the pool or its table")
        self._blocks[slot, : len(blocks)] = blocks
        self._n_blocks[slot] = len(blocks)

    def grow(self, grown: Ints) -> None:
        """Append a block to the table of each slot; `grown` is int64[N, 2], (slot, block)."""
        slots, blocks = grown.T
        if not self._are_live(slots):
            raise BadStep("a block for a slot that is empty")
        if not self._in_pool(blocks) or (self._n_blocks[slots] == self._blocks.shape[1]).any():
            raise BadStep("a new block lies outside the pool or the table")
        self._require_distinct(slots)
        self._blocks[slots, self._n_blocks[slots]] = blocks
        self._n_blocks[slots] += 1

    def tokens_of(self, slot: int) -> Tensor:
        """int32 ids of every known token of a slot, on the device."""
        first = slot * self._row_tokens
        return self._token_ids[first : first + int(self.known[slot])]

    def request_ids(self, slots: Ints) -> list[str]:
        """Names of the requests in `slots`, for the log."""
        return [self._request_ids[slot] for slot in slots.tolist()]

    def _in_pool(self, blocks: NDArray[Any]) -> bool:
        return bool(((blocks > 0) & (blocks < self._num_blocks)).all())

    def _are_live(self, slots: Ints) -> bool:
        in_range = bool(((slots >= 0) & (slots < len(self._live))).all())
        return in_range and bool(self._live[slots].all())

    # -- steps ------------------------------------------------------------------------------------

    def rows(self, step: Step) -> Rows:
        """The rows that `step` computes, once its diffs are applied."""
        slots, n_tokens = map(_as_ints, self._step_rows.follow(step))
        starts, samples = np.empty_like(slots), np.empty(len(slots), np.bool_)
        state = Slots(self._live, self.known, self.computed, self._n_blocks, self._marks)
        most, block_tokens = self._row_tokens - 1, self._block_tokens
        found = admit_rows(slots, n_tokens, state, most, block_tokens, starts, samples)
        if found != FITS:
            raise BadStep(_MISFITS[found])
        return Rows(np.arange(len(slots)), slots, n_tokens, starts, samples)

    def _require_distinct(self, slots: Ints) -> None:
        # A slot standing twice keeps the mark of one place only.
        places = np.arange(len(slots))
        self._marks[slots] = places
        if (self._marks[slots] != places).any():
            raise BadStep("a slot stands twice in the step")

    def gather(self, rows: Rows) -> StepInputs:
        """Pack the inputs of `rows` from their slots."""
        seq_lens = rows.starts + rows.n_tokens
        max_seq_tokens = int(seq_lens.max())
        inputs = _room_for(rows, -(-max_seq_tokens // self._block_tokens))
        lay_out(
            rows.slots,
            rows.n_tokens,
            rows.starts,
            self._blocks,
            self._row_tokens,
            self._block_tokens,
            inputs,
        )
        longer = np.flatnonzero(rows.n_tokens != 1)
        to_device = self._to_device
        return StepInputs(
            token_ids=self._take(inputs.places),
            positions=to_device(inputs.positions),
            attention=AttentionInputs(
                query_start=to_device(inputs.query_start),
                seq_lens=to_device(inputs.seq_lens),
                block_tables=to_device(inputs.tables),
                slot_mapping=to_device(inputs.slot_mapping),
                max_query_tokens=int(rows.n_tokens.max()),
                max_seq_tokens=max_seq_tokens,
                n_decode=int(longer[0]) if len(longer) else len(rows),
            ),
        )

    def commit(self, rows: Rows, sampled: Tensor) -> None:
        """Count what `rows` computed; append their tokens `sampled`, int64 on the device, one for
        each row that samples, in order."""
        slots = rows.slots[rows.samples]
        self._put(slots * self._row_tokens + self.known[slots], sampled)
        self.known[slots] += 1
        self.computed[rows.slots] = rows.starts + rows.n_tokens

    def _take(self, places: Ints) -> Tensor:
        if self._device.type == "cpu":  # numpy's indexing is a good deal lighter than torch's
            return torch.from_numpy(self._token_ids.numpy()[places].astype(np.int64))
        return self._token_ids[self._to_device(places)].to(torch.int64)

    def _put(self, places: Ints, tokens: Tensor) -> None:
        if self._device.type == "cpu":
            self._token_ids.numpy()[places] = tokens.numpy()
        else:
            self._token_ids[self._to_device(places)] = tokens.to(torch.int32)

    def _to_device(self, array: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _room_for(rows: Rows, blocks: int) -> Inputs:
    tokens, n = int(rows.n_tokens.sum()), len(rows)
    places, positions, slot_mapping = np.empty((3, tokens), np.int64)
    lens, tables = np.empty(2 * n + 1, np.int32), np.empty((n, blocks), np.int32)
    return Inputs(places, positions, slot_mapping, lens[: n + 1], lens[n + 1 :], tables)

"""The host's part of a step: checking its rows against the batch, and laying out their inputs.

A step of a small model is over in milliseconds, during which its weights push everything else out
of the caches: some thirty array operations would then cost as much as a tenth of it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagemesh.kernels.cpu.jit import kernel

FITS: Final = 0
NO_TOKENS: Final = 1
NOT_LIVE: Final = 2
TWICE: Final = 3
NOT_KNOWN: Final = 4
FEW_BLOCKS: Final = 5


class Slots(NamedTuple):
    """The batch's state by slot: whether a request lives there, tokens known and computed, blocks
    in its table; and a scratch column."""

    live: NDArray[np.bool_]
    known: NDArray[np.int64]
    computed: NDArray[np.int64]
    n_blocks: NDArray[np.int64]
    marks: NDArray[np.int64]


@kernel
def admit_rows(
    slots: NDArray[np.int64], n_tokens: NDArray[np.int64], state: Slots, most_tokens: int,
    block_tokens: int, starts: NDArray[np.int64], samples: NDArray[np.bool_],
) -> int:  # fmt: skip
    """Fill each row's first position and whether it samples: FITS, or what does not."""
    for row in range(len(slots)):
        slot = slots[row]
        if n_tokens[row] <= 0:
            return NO_TOKENS
        if not 0 <= slot < len(state.live) or not state.live[slot]:
            return NOT_LIVE
        end = state.computed[slot] + n_tokens[row]
        if end > min(state.known[slot], most_tokens):
            return NOT_KNOWN
        if end > state.n_blocks[slot] * block_tokens:
            return FEW_BLOCKS
        starts[row], samples[row] = end - n_tokens[row], end == state.known[slot]
        state.marks[slot] = row
    for row in range(len(slots)):  # a slot standing twice keeps the mark of one row only
        if state.marks[slots[row]] != row:
            return TWICE
    return FITS


class Inputs(NamedTuple):
    """What `lay_out` fills: places of the tokens in the slots' ids, positions and slot_mapping
    int64[T]; query_start int32[R + 1], seq_lens int32[R], tables int32[R, blocks]."""

    places: NDArray[np.int64]
    positions: NDArray[np.int64]
    slot_mapping: NDArray[np.int64]
    query_start: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    tables: NDArray[np.int32]


@kernel
def lay_out(
    slots: NDArray[np.int64], n_tokens: NDArray[np.int64], starts: NDArray[np.int64],
    blocks: NDArray[np.int32], row_tokens: int, block_tokens: int, inputs: Inputs,
) -> None:  # fmt: skip
    """Lay out rows whose slots have their blocks in `blocks` and `row_tokens` ids each."""
    token = 0
    inputs.query_start[0] = 0
    for row in range(len(slots)):
        slot = slots[row]
        for position in range(starts[row], starts[row] + n_tokens[row]):
            inputs.places[token] = slot * row_tokens + position
            inputs.positions[token] = position
            block, offset = divmod(position, block_tokens)
            inputs.slot_mapping[token] = blocks[slot, block] * block_tokens + offset
            token += 1
        inputs.query_start[row + 1] = token
        inputs.seq_lens[row] = starts[row] + n_tokens[row]
        inputs.tables[row] = blocks[slot, : inputs.tables.shape[1]]

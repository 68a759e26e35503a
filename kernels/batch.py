"""The persistent batch on a device: staged writes into the state, and a step's inputs gathered from
it. State is by slot and unordered; inputs are packed per step. The two never share memory."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

ROW_WORDS: Final = 4
WRITE_WORDS: Final = 4


class BatchState(NamedTuple):
    """What the device keeps by slot: token_ids int32[slots, tokens], tables int32[slots, blocks] of
    block ids, params int32[slots, words] of sampling parameters."""

    token_ids: Tensor
    tables: Tensor
    params: Tensor


class StepBuffers(NamedTuple):
    """A step's packed inputs: R rows and T tokens, or more, whose rest is padding.

    token_ids, positions, slot_mapping int64[T]; query_start int32[R + 1], seq_lens int32[R],
    block_tables int32[R, blocks]; slots int32[R] (-1: padding) and next_positions int32[R], the
    positions that tokens sampled in this step will have.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slots: Tensor
    next_positions: Tensor

    @classmethod
    def empty(cls, n_rows: int, n_tokens: int, n_blocks: int, device: torch.device) -> StepBuffers:
        def longs() -> Tensor:
            return torch.zeros(n_tokens, dtype=torch.int64, device=device)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            token_ids=longs(),
            positions=longs(),
            slot_mapping=longs(),
            query_start=ints(n_rows + 1),
            seq_lens=ints(n_rows),
            block_tables=ints(n_rows, n_blocks),
            slots=ints(n_rows),
            next_positions=ints(n_rows),
        )

    def part(self, n_rows: int, n_tokens: int) -> StepBuffers:
        """Views of the first rows and tokens."""
        return StepBuffers(
            token_ids=self.token_ids[:n_tokens],
            positions=self.positions[:n_tokens],
            slot_mapping=self.slot_mapping[:n_tokens],
            query_start=self.query_start[: n_rows + 1],
            seq_lens=self.seq_lens[:n_rows],
            block_tables=self.block_tables[:n_rows],
            slots=self.slots[:n_rows],
            next_positions=self.next_positions[:n_rows],
        )


def scatter_writes(words: Tensor, n_writes: int, state: BatchState) -> None:
    """Apply staged writes to the state.

    int32 `words` begin with `n_writes` quadruples (field of the state, first word in the flattened
    field, first word of the values in `words`, number of values). Writes do not overlap.
    """
    fields = [field.view(-1) for field in state]
    for field, first, source, n in words[: n_writes * WRITE_WORDS].view(-1, WRITE_WORDS).tolist():
        fields[field][first : first + n] = words[source : source + n]


def gather_rows(rows: Tensor, state: BatchState, block_tokens: int, out: StepBuffers) -> None:
    """Fill `out` for rows int32[R, 4] = (slot, first position, tokens, first token in the packed
    step), in order and without gaps; slot -1 is padding: tokens of no sequence.

    Of a row's block table only the blocks that its tokens reach are filled. Then each row's first
    position is moved on by its tokens: rows that only decode are right for the next step.
    """
    for row, (slot, start, n, first) in enumerate(rows.tolist()):
        out.query_start[row] = first
        out.query_start[row + 1] = first + n
        out.slots[row] = slot
        tokens = slice(first, first + n)
        if slot < 0:
            out.seq_lens[row], out.next_positions[row] = 0, 0
            out.token_ids[tokens], out.positions[tokens], out.slot_mapping[tokens] = 0, 0, -1
            out.block_tables[row, 0] = 0
            continue
        end = start + n
        positions = torch.arange(start, end, device=rows.device)
        table = state.tables[slot, : -(-end // block_tokens)]
        out.seq_lens[row], out.next_positions[row] = end, end
        out.token_ids[tokens] = state.token_ids[slot, start:end].long()
        out.positions[tokens] = positions
        blocks = table[positions // block_tokens].long()
        out.slot_mapping[tokens] = blocks * block_tokens + positions % block_tokens
        out.block_tables[row, : len(table)] = table
        rows[row, 1] = end

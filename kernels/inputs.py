"""What attention must know about one step's batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The packed batch of one step: R rows (sequences), T tokens, decode rows first.

    A padding row has `seq_lens` 0, block table 0 (the null block) and slot -1. Block table columns
    past a row's last block are never read, whatever they hold.
    """

    query_start: Tensor
    """int32[R+1]: row r owns tokens query_start[r] to query_start[r+1] of the packed batch."""
    seq_lens: Tensor
    """int32[R]: context length in tokens, this step's tokens included."""
    block_tables: Tensor
    """int32[R, max_blocks]: block ids in order of position."""
    slot_mapping: Tensor
    """int64[T]: block * block_tokens + offset where a token's K and V go; -1 stores nothing."""
    max_query_tokens: int
    max_seq_tokens: int
    n_decode: int
    """Leading rows with exactly one query token each."""

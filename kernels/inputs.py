"""What attention must know about one step's batch."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionInputs:
    """The packed batch of one step: R rows (sequences), T tokens, decode rows first.

    A padding row has `seq_lens` 0, block table 0 (the null block) and slot -1. Block table columns
    past a row's last block are never read, whatever they hold. One object belongs to one step: the
    tensors' contents must not change while it is in use.
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
    """Leading rows with exactly one query token each; with `counts` the most there may be."""
    counts: Tensor | None = None
    """int32[2] on the device, in a step that a CUDA graph computes: how many rows there are, and
    how many of them lead with one token each. Rows after these have no tokens."""
    plans: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)
    """What a kernel worked out from the above in the first layer, for the layers after it."""

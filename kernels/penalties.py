"""Changes to raw logits before sampling: bias, bans, and penalties for repeated tokens.

All work in place on float32[R, V] logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Penalties(NamedTuple):
    """Per row, float32[R]: repetition (1 = off), frequency (0 = off), presence (0 = off)."""

    repetition: Tensor
    frequency: Tensor
    presence: Tensor


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    prompt_seen: Tensor,
    output_counts: Tensor,
    count_rows: Tensor,
    penalties: Penalties,
) -> None:
    """Penalise the rows `rows` (int64[P]) of `logits` by the tokens they have seen.

    Row i of them reads row `count_rows[i]` (int64[P]) of `prompt_seen` (bool[N, V]) and
    `output_counts` (int32[N, V]). As in CTRL (Keskar et al. 2019) the repetition penalty divides
    positive and multiplies negative logits of every token seen, prompt included; frequency and
    presence, as in OpenAI's API, look at the output alone.
    """
    counts = output_counts[count_rows]
    seen = prompt_seen[count_rows] | (counts > 0)
    before = logits[rows]
    factor = penalties.repetition.unsqueeze(1)
    repeated = torch.where(before > 0, before / factor, before * factor)
    after = torch.where(seen, repeated, before)
    after -= penalties.frequency.unsqueeze(1) * counts
    after -= penalties.presence.unsqueeze(1) * (counts > 0)
    logits[rows] = after


def add_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, biases: Tensor) -> None:
    """logits[rows[i], token_ids[i]] += biases[i]; int64[N], int64[N], float32[N]."""
    logits.index_put_((rows, token_ids), biases, accumulate=True)


def ban(logits: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """logits[rows[i], token_ids[i]] = -inf; int64[N], int64[N]."""
    logits[rows, token_ids] = -torch.inf

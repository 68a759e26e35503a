"""Changes to raw logits before sampling: bias, bans, and penalties for repeated tokens.

All work in place on float32[R, V] logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pagemesh.kernels.search import where


class Penalties(NamedTuple):
    """Per row, float32[R]: repetition (1 = off), frequency (0 = off), presence (0 = off)."""

    repetition: Tensor
    frequency: Tensor
    presence: Tensor


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    seen: Tensor,
    output_counts: Tensor,
    count_rows: Tensor,
    penalties: Penalties,
) -> None:
    """Penalise the rows `rows` (int64[P]) of `logits` by the tokens they have seen.

    Row i of them reads row `count_rows[i]` (int64[P]) of `seen` (bool[N, V], prompt and output) and
    `output_counts` (int32[N, V]). As in CTRL (Keskar et al. 2019) the repetition penalty divides
    positive and multiplies negative logits of every token seen; frequency and presence, as in
    OpenAI's API, look at the output alone.
    """
    which, ids = where(seen[count_rows])
    repetition, frequency, presence = (penalty[which] for penalty in penalties)
    before = logits[rows[which], ids]
    counts = output_counts[count_rows[which], ids]
    after = torch.where(before > 0, before / repetition, before * repetition)
    after -= frequency * counts + presence * (counts > 0)
    logits[rows[which], ids] = after


def add_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, biases: Tensor) -> None:
    """logits[rows[i], token_ids[i]] += biases[i]; int64[N], int64[N], float32[N].

    A bias of -inf bans the token, whatever else is added to it.
    """
    logits.index_put_((rows, token_ids), biases, accumulate=True)

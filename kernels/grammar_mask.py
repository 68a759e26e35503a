"""Bans by bit mask: what a grammar lets come next, for some rows of a batch. The reference."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = 32


def apply_masks(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Set float32[R, V] `logits` of int32[G] `rows`, all different, to -inf where int32[G,
    ceil(V / 32)] `masks` have no bit: that of token t is bit t % 32 of word t // 32. A NaN stays,
    so that logits that were not finite can be told."""
    vocab_tokens = logits.shape[1]
    bits = torch.arange(_BITS, dtype=torch.int32, device=masks.device)
    allowed = ((masks[:, :, None] >> bits) & 1).flatten(1)[:, :vocab_tokens] > 0
    of_rows = logits[rows.to(torch.int64)]
    logits[rows.to(torch.int64)] = of_rows.masked_fill(~allowed & ~of_rows.isnan(), -torch.inf)

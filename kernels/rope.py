"""Rotary position embedding (Su et al., 2021) in the half-split layout of the Llama family."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_cos_sin(
    positions: Tensor, inv_freq: Tensor, attention_factor: float
) -> tuple[Tensor, Tensor]:
    """cos and sin, float32[T, D/2], of positions int64[T] times inv_freq float32[D/2].

    `attention_factor` multiplies both (YaRN's temperature; 1 elsewhere).
    """
    angles = positions[:, None].float() * inv_freq
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q [T, Hq, D] and k [T, Hkv, D], rotated in float32 and returned in their dtype."""
    cos, sin = cos[:, None], sin[:, None]
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Element i of a head turns with element i + D/2."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)

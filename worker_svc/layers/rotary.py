"""Rotary frequencies of a model, for every supported kind of context extension."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pagemesh.kernels.rope import rope_cos_sin
from pagemesh.worker_svc.models.rope_config import RopeConfig


class Rotary(nn.Module):
    """cos and sin for a step's positions, computed once and shared by all layers."""

    inv_freq: Tensor

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device | str) -> None:
        super().__init__()
        self.kind = rope.kind
        self.attention_factor = rope.attention_factor
        self.register_buffer("inv_freq", inverse_frequencies(rope, head_dim).to(device))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions int64[T]; returns float32[T, head_dim / 2] twice."""
        return rope_cos_sin(positions, self.inv_freq, self.attention_factor)

    def divide_frequencies(self, factors: Tensor) -> None:
        """Apply factors [head_dim / 2] that came with the weights (a GGUF's rope_freqs)."""
        self.inv_freq /= factors.to(self.inv_freq)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """float32[head_dim / 2], in radians per token."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = rope.theta**exponents
    if rope.kind == "linear":
        return 1.0 / frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(1.0 / frequencies, rope)
    if rope.kind == "yarn":
        return _yarn(frequencies, rope, head_dim)
    return 1.0 / frequencies


def _llama3(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between blended."""
    turns = rope.original_tokens * inv_freq / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    kept = ((turns - rope.low_freq_factor) / span).clamp(0, 1)
    return (1 - kept) * inv_freq / rope.factor + kept * inv_freq


def _yarn(frequencies: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """YaRN (Peng et al., 2023), section 3.2: NTK by parts, ramped over dimensions."""

    def dimension_turning(turns: float) -> float:
        ratio = rope.original_tokens / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension_turning(rope.beta_fast), dimension_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low or 0.001
    slowed = ((torch.arange(head_dim // 2).float() - low) / span).clamp(0, 1)
    return slowed / (rope.factor * frequencies) + (1 - slowed) / frequencies

"""The gated MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pagemesh.kernels.activation import silu_mul
from pagemesh.worker_svc.layers.linear import FusedLinear, Linear
from pagemesh.worker_svc.layers.weights import WeightViews
from pagemesh.worker_svc.models.config import DecoderConfig


class MLP(nn.Module):
    def __init__(
        self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up = FusedLinear(hidden, parts, bias=bias, dtype=dtype, device=device)
        self.down = Linear(inner, hidden, "down_proj", bias=bias, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, H] to [T, H]."""
        out: Tensor = self.down(silu_mul(self.gate_up(x)))
        return out

    def weight_views(self, prefix: str) -> WeightViews:
        yield from self.gate_up.weight_views(prefix)
        yield from self.down.weight_views(prefix)

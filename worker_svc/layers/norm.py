"""The RMSNorm layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pagemesh.kernels.norm import add_rms_norm, rms_norm
from pagemesh.worker_svc.layers.weights import WeightViews, empty_parameter


class RMSNorm(nn.Module):
    def __init__(
        self, features: int, eps: float, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(features, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual)."""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def weight_views(self, name: str) -> WeightViews:
        yield f"{name}.weight", self.weight

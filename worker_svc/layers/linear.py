"""Linear layers, one matrix or several fused into one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from pagemesh.worker_svc.layers.weights import WeightViews, empty_parameter


class FusedLinear(nn.Module):
    """Matrices that read the same input, stacked by rows: one GEMM instead of several.

    `parts` maps the name of each in the checkpoint to its output features, in order.
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.parts = parts
        out_features = sum(parts.values())
        self.weight = empty_parameter(out_features, in_features, dtype=dtype, device=device)
        self.bias = empty_parameter(out_features, dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in] to [T, sum of parts]."""
        return linear(x, self.weight, self.bias)

    def weight_views(self, prefix: str) -> WeightViews:
        """`prefix` is that of the block the parts lie in, such as `model.layers.0.mlp`."""
        for kind, parameter in (("weight", self.weight), ("bias", self.bias)):
            if parameter is not None:
                views = torch.split(parameter, list(self.parts.values()))
                for part, view in zip(self.parts, views, strict=True):
                    yield f"{prefix}.{part}.{kind}", view


class Linear(FusedLinear):
    """One matrix, called `name` in the checkpoint."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        name: str,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__(in_features, {name: out_features}, bias=bias, dtype=dtype, device=device)

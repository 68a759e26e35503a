"""Linear layers, one matrix or several fused into one."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from pagemesh.worker_svc.layers.weights import WeightViews, empty_parameter

# A CPU without bfloat16 instructions multiplies bfloat16 four times slower than float32. From this
# many rows on, widening the weights first costs less than that. (Measured: equal at 8 to 16 rows.)
_WIDEN_FROM_ROWS: Final = 16
# Weights widened at once: 4 MiB of float32, so that they are used while in the CPU's cache.
_WIDEN_ELEMENTS: Final = 2**20


def project(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in] times weight [out, in] transposed, plus bias [out]; in x's dtype."""
    narrow = x.dtype is torch.bfloat16 and x.device.type == "cpu"
    if not narrow or x.shape[0] < _WIDEN_FROM_ROWS or _cpu_multiplies_bfloat16():
        return linear(x, weight, bias)
    out = _project_widened(x.float(), weight)
    return (out if bias is None else out + bias).to(x.dtype)


def _project_widened(x: Tensor, weight: Tensor) -> Tensor:
    """float32 x [T, in] times a narrower weight [out, in] transposed; float32."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    step = max(1, _WIDEN_ELEMENTS // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        out[:, start : start + step] = linear(x, weight[start : start + step].float())
    return out


@cache
def _cpu_multiplies_bfloat16() -> bool:
    able = torch.cpu.get_capabilities()
    return any(able.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


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
        return project(x, self.weight, self.bias)

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

"""RMSNorm for a GPU, alone and fused with the residual addition before it. One program a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagemesh.kernels.gpu.kernel import kernel
from pagemesh.kernels.gpu.launch import next_power_of_2, pdl
from pagemesh.kernels.gpu.splits import load_joined, rounded, split_shape


@dataclass(frozen=True, slots=True)
class NormConfig:
    """How a row is shared out. The order of its sum follows from this, so nothing here may depend
    on the other rows."""

    num_warps: int


def choose_config(hidden: int) -> NormConfig:
    """Eight elements a thread: 16 bytes of a 16-bit type."""
    threads = next_power_of_2(hidden) // 8
    return NormConfig(num_warps=min(max(threads // 32, 1), 16))


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, config: NormConfig | None = None) -> Tensor:
    """rms_norm of x [T, H], or of K-splits float32[S, T, H]; returns [T, H] in weight's dtype."""
    normed = torch.empty(x.shape[-2:], dtype=weight.dtype, device=x.device)
    _launch(x, None, weight, normed, eps, config)
    return normed


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, config: NormConfig | None = None
) -> tuple[Tensor, Tensor]:
    """add_rms_norm of x [T, H] or K-splits float32[S, T, H], and residual [T, H].

    `residual` is updated in place: the sum that is returned is that tensor.
    """
    normed = torch.empty_like(residual)
    _launch(x, residual, weight, normed, eps, config)
    return normed, residual


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    normed: Tensor,
    eps: float,
    config: NormConfig | None,
) -> None:
    rows, hidden = normed.shape
    if rows == 0:
        return
    splits, split_stride = split_shape(x)
    _norm_kernel[(rows,)](
        x,
        split_stride,
        residual,
        weight,
        normed,
        eps,
        HIDDEN=hidden,
        BLOCK=next_power_of_2(hidden),
        SPLITS=splits,
        PDL=pdl(),
        num_warps=(config or choose_config(hidden)).num_warps,
        launch_pdl=pdl(),
    )


@kernel()
def _norm_kernel(
    x,
    split_stride,
    residual,
    weight,
    normed,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    column = tl.arange(0, BLOCK)
    mask = column < HIDDEN
    gain = tl.load(weight + column, mask=mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0).to(tl.int64) * HIDDEN + column
    total = rounded(load_joined(x, at, mask, split_stride, SPLITS), gain.dtype)
    if residual is not None:
        total = rounded(total + tl.load(residual + at, mask=mask, other=0.0), gain.dtype)
        tl.store(residual + at, total, mask=mask)
    tl.store(normed + at, normalised(total, gain, eps, HIDDEN), mask=mask)


@triton.jit
def normalised(total, gain, eps, HIDDEN: tl.constexpr):
    """RMSNorm of a float32 row that has already been rounded to gain's dtype."""
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / HIDDEN + eps)
    return rounded(total * scale, gain.dtype) * gain

"""The gated activation of the MLP for a GPU: a grid of blocks, rows outermost."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from pagemesh.kernels.gpu.kernel import kernel
from pagemesh.kernels.gpu.launch import cdiv, next_power_of_2, pdl
from pagemesh.kernels.gpu.splits import load_joined, rounded, split_shape


@dataclass(frozen=True, slots=True)
class ActivationConfig:
    block: int
    """Outputs of a program."""
    num_warps: int


def choose_config(inner: int) -> ActivationConfig:
    """Eight elements a thread: 16 bytes of a 16-bit type."""
    block = min(next_power_of_2(inner), 1024)
    return ActivationConfig(block=block, num_warps=max(block // 256, 1))


def silu_mul(
    gate_up: Tensor,
    *,
    dtype: torch.dtype | None = None,
    config: ActivationConfig | None = None,
) -> Tensor:
    """silu_mul of gate_up [T, 2 * I], or of its K-splits float32[S, T, 2 * I], which round to
    `dtype` (gate_up's own by default); returns [T, I] in `dtype`."""
    rows, columns = gate_up.shape[-2:]
    inner = columns // 2
    out = torch.empty(rows, inner, dtype=dtype or gate_up.dtype, device=gate_up.device)
    config = config or choose_config(inner)
    splits, split_stride = split_shape(gate_up)
    if rows:
        _silu_mul_kernel[(rows * cdiv(inner, config.block),)](
            gate_up,
            split_stride,
            out,
            INNER=inner,
            BLOCK=config.block,
            SPLITS=splits,
            PDL=pdl(),
            num_warps=config.num_warps,
            launch_pdl=pdl(),
        )
    return out


@kernel()
def _silu_mul_kernel(
    gate_up,
    split_stride,
    out,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    dtype: tl.constexpr = out.dtype.element_ty
    blocks: tl.constexpr = (INNER + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = column < INNER
    at = row * (2 * INNER) + column
    gate = rounded(load_joined(gate_up, at, mask, split_stride, SPLITS), dtype)
    up = rounded(load_joined(gate_up, at + INNER, mask, split_stride, SPLITS), dtype)
    tl.store(out + row * INNER + column, rounded(gate / (1 + tl.exp(-gate)), dtype) * up, mask=mask)

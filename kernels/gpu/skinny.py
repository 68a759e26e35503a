"""Linear layers for the few rows of a decode step, bound by the bytes of the weights.

The weights [N, K] are the left operand of the matrix instruction, so that its 64 rows are filled by
output features and only as many columns as there are rows of x are computed. K may be split over
programs, so that a small matrix, too, keeps every multiprocessor reading.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from pagemesh.kernels.activation import silu_mul
from pagemesh.kernels.gpu.kernel import kernel
from pagemesh.kernels.gpu.launch import cdiv, multiprocessors, pdl
from pagemesh.kernels.gpu.skinny_config import (
    Launch,
    SkinnyConfig,
    choose_config,
    choose_gated_config,
)
from pagemesh.kernels.gpu.skinny_tma import fits_tma, is_hopper, tma_launch

# Where a program may have less shared memory than on the card that the configurations are for.
_STAGES_ELSEWHERE = 3


@triton.jit
def _prefetch(rows, first, steps, k, BLOCK_K: tl.constexpr, STEPS: tl.constexpr):
    """Bring the first STEPS of a tile into L2, a cache line of 128 bytes at a time."""
    line: tl.constexpr = 1024 // rows.dtype.element_ty.primitive_bitwidth
    for step in tl.static_range(STEPS):
        if step < steps:
            column = first + step * BLOCK_K + tl.arange(0, (BLOCK_K + line - 1) // line) * line
            column = tl.minimum(column, k - 1)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
                "=r,l",
                [rows + column[None, :]],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit
def _weight_rows(tile, n, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """(output feature, row of w) of each row of a tile.

    Gated, 8 rows of gate alternate with the 8 of up that belong to them: one thread of the matrix
    instruction's result holds rows i and i + 8, so that a pair meets in registers.
    """
    row = tl.arange(0, BLOCK_N)
    if GATED:
        feature = tile * (BLOCK_N // 2) + row // 16 * 8 + row % 8
        return feature, tl.minimum(feature, n - 1) + row // 8 % 2 * n
    feature = tile * BLOCK_N + row
    return feature, tl.minimum(feature, n - 1)


@triton.jit
def _silu_mul(both, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, dtype: tl.constexpr):
    """silu(gate) * up for the products `both` of one gated tile, rounded as torch rounds them."""
    pairs = both.reshape(BLOCK_N // 16, 2, 8, BLOCK_R).permute(0, 2, 3, 1)
    gate, up = tl.split(pairs)
    gate = gate.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype)
    return (silu * up.to(dtype)).reshape(BLOCK_N // 2, BLOCK_R)


@kernel(do_not_specialize=["rows", "steps"])
def _skinny_kernel(
    x,  # [rows, k], rows x_stride apart
    w,  # [n, k], or [2 n, k] if gated
    bias,  # [n]
    y,  # [rows, n], or float32 [splits, rows, n]
    rows,
    n,
    k,
    x_stride,
    steps,  # of BLOCK_K for each split
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row_tile = tl.program_id(0)  # The fastest: neighbours share the weights they read.
    split = tl.program_id(1)
    tile = tl.program_id(2)
    feature, weight_row = _weight_rows(tile, n, BLOCK_N, GATED)
    weight_rows = w + weight_row[:, None].to(tl.int64) * k
    first = split * steps * BLOCK_K
    _prefetch(weight_rows, first, steps, k, BLOCK_K, PREFETCH)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = row_tile * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_K)
    row_mask = row[:, None] < rows
    x_rows = x + row[:, None].to(tl.int64) * x_stride
    total = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    for step in range(steps):
        at = first + step * BLOCK_K + column[None, :]
        if EVEN_K:
            weights = tl.load(weight_rows + at)
            inputs = tl.load(x_rows + at, mask=row_mask, other=0.0)
        else:
            weights = tl.load(weight_rows + at, mask=at < k, other=0.0)
            inputs = tl.load(x_rows + at, mask=row_mask & (at < k), other=0.0)
        total = tl.dot(weights, inputs.T, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + tl.minimum(feature, n - 1)).to(tl.float32)[:, None]
    dtype: tl.constexpr = y.dtype.element_ty
    if GATED:
        half = tl.arange(0, BLOCK_N // 2)
        feature = tile * (BLOCK_N // 2) + half
        result = _silu_mul(total, BLOCK_N, BLOCK_R, dtype)
    else:
        result = total.to(dtype)
    at = (split * rows + row[None, :]).to(tl.int64) * n + feature[:, None]
    tl.store(y + at, result, mask=(row[None, :] < rows) & (feature[:, None] < n))


def skinny_linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    config: SkinnyConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x [R, K] @ w [N, K]^T + bias [N]: [R, N] in x's dtype.

    With config.splits > 1 it is float32 [splits, R, N], to be added in that order by who reads it,
    and takes no bias. Without a config the best is chosen among those that do not split; cuBLAS
    may be. `out` takes the result, [R, N].
    """
    if config is None:
        n, k = w.shape
        config = choose_config(x.shape[0], n, k, x.dtype, multiprocessors(), max_splits=1)
    if config is None:
        return linear(x, w, bias) if out is None else torch.mm(x, w.T, out=out)
    if bias is not None and config.splits > 1:
        raise ValueError("the bias of a split layer is added by the reader of its parts")
    return _run(x, w, bias, config, gated=False, out=out)


def skinny_gate_up(x: Tensor, w: Tensor, *, config: SkinnyConfig | None = None) -> Tensor:
    """silu(x @ gate^T) * (x @ up^T), [R, I], for x [R, K] and w [2 * I, K], gate before up."""
    if config is None:
        inner, k = w.shape[0] // 2, w.shape[1]
        config = choose_gated_config(x.shape[0], inner, k, x.dtype, multiprocessors())
    if config is None:
        return silu_mul(linear(x, w))
    if config.splits > 1:
        raise ValueError("a gated layer needs whole sums, so it cannot be split")
    return _run(x, w, None, config, gated=True)


def _run(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    config: SkinnyConfig,
    *,
    gated: bool,
    out: Tensor | None = None,
) -> Tensor:
    if out is None:
        out = _empty_out(x, w, config, gated=gated)
    if x.shape[0]:
        _launch(x, w, bias, out, config, gated=gated).run()
    return out


def skinny_launch(x: Tensor, w: Tensor, config: SkinnyConfig, *, gated: bool = False) -> Launch:
    """What a call with such tensors launches, to be compiled ahead; they may be on `meta`."""
    return _launch(x, w, None, _empty_out(x, w, config, gated=gated), config, gated=gated)


def _empty_out(x: Tensor, w: Tensor, config: SkinnyConfig, *, gated: bool) -> Tensor:
    rows, n = x.shape[0], w.shape[0] // 2 if gated else w.shape[0]
    if config.splits == 1:
        return x.new_empty(rows, n)
    return x.new_empty(config.splits, rows, n, dtype=torch.float32)


def _launch(
    x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor, config: SkinnyConfig, *, gated: bool
) -> Launch:
    if fits_tma(x, w, config, gated=gated):
        return tma_launch(x, w, bias, out, config, gated=gated)
    rows, k = x.shape
    n = out.shape[-1]
    block_r = config.rows_tile(rows)
    features = config.block_n // 2 if gated else config.block_n
    grid = (cdiv(rows, block_r), config.splits, cdiv(n, features))
    steps = config.steps(k)
    stages = config.stages(rows, x.element_size(), steps)
    options = {
        "BLOCK_R": block_r,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GATED": gated,
        "HAS_BIAS": bias is not None,
        "EVEN_K": k % (config.block_k * config.splits) == 0,
        "PREFETCH": config.prefetch if pdl() else 0,
        "PDL": pdl(),
        "num_warps": config.warps,
        "num_stages": stages if is_hopper() else min(stages, _STAGES_ELSEWHERE),
        "launch_pdl": pdl(),
    }
    arguments = (x, w, bias, out, rows, n, k, x.stride(0), steps)
    return Launch(_skinny_kernel, grid, arguments, options)

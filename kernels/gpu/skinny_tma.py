"""Linear layers for few rows through Hopper's tensor memory accelerator.

The same products in the same order as in skinny.py, with two things its pipeline cannot express:
the weights of the first steps are on their way to shared memory before the kernel in front has
finished, and the stream of loads does not run dry between two tiles of a program.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemesh.kernels.gpu.boxes import GLUON_TYPES, boxes
from pagemesh.kernels.gpu.kernel import gluon_kernel
from pagemesh.kernels.gpu.launch import cdiv, multiprocessors, pdl
from pagemesh.kernels.gpu.skinny_config import Launch, SkinnyConfig


@gluon.jit
def _place(item, ROW_TILES: gl.constexpr, SPLITS: gl.constexpr):
    """(tile of rows of x, split, tile of features): neighbours share the weights they read."""
    return item % ROW_TILES, item // ROW_TILES % SPLITS, item // ROW_TILES // SPLITS


@gluon.jit
def _next(item, step, steps):
    """The step after this one, of this item or of the program's next."""
    last = step + 1 == steps
    return gl.where(last, item + gl.num_programs(0), item), gl.where(last, 0, step + 1)


@gluon.jit
def _load(tiles, stages, ready, slot, row, column):
    """Ask for tile (row, column) to be brought to a stage."""
    if len(tiles.block_shape) == 4:  # Of gate and up.
        at = [row * tiles.block_shape[0], 0, 0, column * tiles.block_shape[3]]
    else:
        at = [row * tiles.block_shape[0], column * tiles.block_shape[1]]
    tma.async_copy_global_to_shared(tiles, at, ready.index(slot), stages.index(slot))


@gluon.jit
def _silu_mul(both, dtype: gl.constexpr):
    """silu(gate) * up, rounded as torch rounds them: see `_weight_rows` in skinny.py."""
    block_n: gl.constexpr = both.shape[0]
    block_r: gl.constexpr = both.shape[1]
    pairs = both.reshape([block_n // 16, 2, 8, block_r]).permute([0, 2, 3, 1])
    gate, up = gl.split(pairs)
    gate = gate.to(dtype).to(gl.float32)
    silu = (gate / (1.0 + gl.exp(-gate))).to(dtype)
    return (silu * up.to(dtype)).reshape([block_n // 2, block_r])


@gluon.jit
def _store(result, y, rows, n, row_tile, split, tile):
    """result [features, rows of x] of one item, features side by side in a thread."""
    lanes: gl.constexpr = min(32, result.shape[0] // 4)
    layout: gl.constexpr = gl.BlockedLayout(
        [4, 1], [lanes, 32 // lanes], [1, gl.num_warps()], [0, 1]
    )
    result = gl.convert_layout(result, layout)
    feature = tile * result.shape[0] + gl.arange(0, result.shape[0], gl.SliceLayout(1, layout))
    row = row_tile * result.shape[1] + gl.arange(0, result.shape[1], gl.SliceLayout(0, layout))
    at = (split * rows + row).to(gl.int64)[None, :] * n + feature[:, None]
    gl.store(y + at, result, mask=(row[None, :] < rows) & (feature[:, None] < n))


@gluon_kernel(do_not_specialize=["rows", "steps", "items"])
def skinny_tma_kernel(
    x,  # tiles [block_r, block_k]
    w,  # tiles [BLOCK_N, block_k], or [BLOCK_N // 16, 2, 8, block_k] of gate and up
    bias,  # [n]
    y,  # [rows, n], or float32 [SPLITS, rows, n]
    rows,
    n,
    steps,  # of block_k for each split
    items,  # ROW_TILES * SPLITS * tiles of features
    BLOCK_N: gl.constexpr,
    ROW_TILES: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    block_r: gl.constexpr = x.block_shape[0]
    block_k: gl.constexpr = x.block_shape[1]
    x_stages = gl.allocate_shared_memory(x.dtype, [STAGES, block_r, block_k], x.layout)
    w_shape: gl.constexpr = [STAGES] + w.block_shape  # noqa: RUF005
    w_stages = gl.allocate_shared_memory(w.dtype, w_shape, w.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    stage_bytes: gl.constexpr = (BLOCK_N + block_r) * block_k * 2
    # What to load next: always STAGES steps in front of what is computed.
    item = gl.program_id(0)
    step = 0
    for stage in gl.static_range(STAGES):
        if item < items:
            _, split, tile = _place(item, ROW_TILES, SPLITS)
            mbarrier.expect(ready.index(stage), stage_bytes)
            _load(w, w_stages, ready, stage, tile, split * steps + step)
        item, step = _next(item, step, steps)
    if PDL:
        gdc_wait()
    item = gl.program_id(0)
    step = 0
    for stage in gl.static_range(STAGES):
        if item < items:
            row_tile, split, _ = _place(item, ROW_TILES, SPLITS)
            _load(x, x_stages, ready, stage, row_tile, split * steps + step)
        item, step = _next(item, step, steps)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, block_r, 16])
    dtype: gl.constexpr = y.dtype.element_ty
    slot = 0
    phase = 0
    free = -1  # The stage whose products are done.
    for current in range(gl.program_id(0), items, gl.num_programs(0)):
        result = gl.zeros([BLOCK_N, block_r], gl.float32, layout)
        for _ in range(steps):
            mbarrier.wait(ready.index(slot), phase)
            weights = w_stages.index(slot).reshape([BLOCK_N, block_k])
            inputs = x_stages.index(slot).permute([1, 0])
            result = warpgroup_mma(weights, inputs, result, is_async=True)
            result = warpgroup_mma_wait(1, deps=(result,))
            if free >= 0:
                if item < items:
                    row_tile, split, tile = _place(item, ROW_TILES, SPLITS)
                    mbarrier.expect(ready.index(free), stage_bytes)
                    _load(w, w_stages, ready, free, tile, split * steps + step)
                    _load(x, x_stages, ready, free, row_tile, split * steps + step)
                item, step = _next(item, step, steps)
            free = slot
            last = slot + 1 == STAGES
            slot = gl.where(last, 0, slot + 1)
            phase = gl.where(last, phase ^ 1, phase)
        result = warpgroup_mma_wait(0, deps=(result,))
        row_tile, split, tile = _place(current, ROW_TILES, SPLITS)
        if HAS_BIAS:
            feature = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
            result += gl.load(bias + gl.minimum(feature, n - 1)).to(gl.float32)[:, None]
        if GATED:
            _store(_silu_mul(result, dtype), y, rows, n, row_tile, split, tile)
        else:
            _store(result.to(dtype), y, rows, n, row_tile, split, tile)


@cache
def is_hopper() -> bool:
    """Whether the current device has this accelerator and matrix instruction; later ones have
    another instruction."""
    if knobs.runtime.interpret or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability()[0] == 9


def fits_tma(x: Tensor, w: Tensor, config: SkinnyConfig, *, gated: bool) -> bool:
    """Whether the layer can go this way: 16-bit types, rows that start at multiples of 16 bytes,
    tiles that fill the matrix instruction."""
    whole = not gated or w.shape[0] % 16 == 0
    aligned = all(
        t.data_ptr() % 16 == 0 and t.stride(0) % 8 == 0 and t.stride(1) == 1 for t in (x, w)
    )
    fills = config.block_n % (16 * config.warps) == 0
    suits = whole and aligned and fills and x.dtype in GLUON_TYPES
    return config.tma and is_hopper() and suits


def tma_launch(
    x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor, config: SkinnyConfig, *, gated: bool
) -> Launch:
    """Of a layer that `fits_tma`; `out` is [rows, n], or float32 [splits, rows, n]."""
    rows, k = x.shape
    n = out.shape[-1]
    block_r = config.rows_tile(rows)
    features = config.block_n // 2 if gated else config.block_n
    row_tiles = cdiv(rows, block_r)
    items = row_tiles * config.splits * cdiv(n, features)
    programs = min(items, config.programs * multiprocessors())
    steps = config.steps(k)
    options = {
        "BLOCK_N": config.block_n,
        "ROW_TILES": row_tiles,
        "SPLITS": config.splits,
        "STAGES": config.stages(rows, x.element_size(), steps * cdiv(items, programs)),
        "GATED": gated,
        "HAS_BIAS": bias is not None,
        "PDL": pdl(),
        "num_warps": config.warps,
        "launch_pdl": pdl(),
    }
    x_tiles = boxes(x, x.shape, x.stride(), (block_r, config.block_k))
    if gated:
        shape, strides = (n // 8, 2, 8, k), (8 * k, n * k, k, 1)
        w_tiles = boxes(w, shape, strides, (config.block_n // 16, 2, 8, config.block_k))
    else:
        w_tiles = boxes(w, w.shape, w.stride(), (config.block_n, config.block_k))
    arguments = (x_tiles, w_tiles, bias, out, rows, n, steps, items)
    return Launch(skinny_tma_kernel, (programs,), arguments, options)

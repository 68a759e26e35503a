"""Causal attention of prompt chunks over paged K and V.

A program computes the query heads of one KV head for a few neighbouring tokens, so that each tile
of K and V is read once for all of them (running softmax: FlashAttention-2, Dao, 2023). Tiles begin
at multiples of their size in the sequence and a query meets them in order, whatever else its block
or its batch holds: the same token has the same bits in a whole prompt and in any chunk of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagemesh.kernels.gpu.kernel import kernel
from pagemesh.kernels.gpu.launch import next_power_of_2, pdl
from pagemesh.kernels.inputs import AttentionInputs

LOG2_E: Final = math.log2(math.e)
# Stands for "nothing seen yet": below every score, and its difference to itself is not NaN.
_LOWEST = tl.constexpr(-1e38)


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """How the kernel is cut. `tile_tokens` decides the order of sums, `block_rows` does not."""

    block_rows: int
    """Queries of a program: tokens times the heads that share a KV head."""
    tile_tokens: int
    """Keys read at once."""
    num_warps: int
    num_stages: int


# By padded head dim, for two-byte elements.
_HALF_CONFIGS: Final = {
    64: PrefillConfig(128, 64, 8, 3),
    128: PrefillConfig(128, 128, 8, 2),
    256: PrefillConfig(128, 64, 8, 2),
}
_FLOAT_CONFIG: Final = PrefillConfig(32, 32, 4, 1)


def choose_config(dtype: torch.dtype, head_dim: int, rows: int) -> PrefillConfig:
    """`rows`: the most queries that one KV head has in a sequence of this batch."""
    if dtype.itemsize > 2:
        return _FLOAT_CONFIG
    config = _HALF_CONFIGS[_padded(head_dim)]
    if rows > config.block_rows // 2:
        return config
    return PrefillConfig(
        config.block_rows // 2, config.tile_tokens, config.num_warps // 2, config.num_stages
    )


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    inputs: AttentionInputs,
    *,
    scale: float,
    window: int | None = None,
    out: Tensor,
    config: PrefillConfig | None = None,
) -> None:
    """Attention of the rows behind the decode rows; see `kernels.attention.paged_attention`.

    Writes out[n_decode:], zeros for padding. q [T, Hq, D] may have any stride between tokens.
    """
    n_tokens, n_heads, head_dim = q.shape
    _, n_kv_heads, page_tokens, _ = k_cache.shape
    counted, n_rows = inputs.counts is not None, inputs.seq_lens.shape[0]
    n_decode = 0 if counted else inputs.n_decode
    if n_tokens == n_decode:
        return
    group = n_heads // n_kv_heads
    config = config or choose_config(q.dtype, head_dim, inputs.max_query_tokens * group)
    block_tokens = config.block_rows // group
    # Every row may end in a block that is not full, and so may the padding behind them.
    n_blocks = (n_tokens - n_decode) // block_tokens + n_rows - n_decode + 1
    _prefill_attention[(n_kv_heads, n_blocks)](
        q,
        k_cache,
        v_cache,
        out,
        inputs.query_start,
        inputs.seq_lens,
        inputs.block_tables,
        inputs.counts,
        n_tokens,
        n_rows,
        n_decode,
        q.stride(0),
        out.stride(0),
        k_cache.stride(0),
        inputs.block_tables.stride(0),
        scale * LOG2_E,
        window or 0,
        GROUP=group,
        HEAD_DIM=head_dim,
        PADDED_DIM=_padded(head_dim),
        PAGE=page_tokens,
        HAS_WINDOW=window is not None,
        COUNTED=counted,
        BLOCK_ROWS=config.block_rows,
        BLOCK_TOKENS=block_tokens,
        TILE=config.tile_tokens,
        PDL=pdl(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=pdl(),
    )


def _padded(head_dim: int) -> int:
    return int(next_power_of_2(head_dim))


@kernel(do_not_specialize=["n_tokens", "n_rows", "n_decode", "table_stride", "window"])
def _prefill_attention(
    q,
    k_cache,
    v_cache,
    out,
    query_start,
    seq_lens,
    block_tables,
    counts,
    n_tokens,
    n_rows,
    n_decode,
    q_stride,
    out_stride,
    block_stride,
    table_stride,
    log2_scale,
    window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    COUNTED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if COUNTED:
        n_rows = tl.load(counts)
        n_decode = tl.load(counts + 1)
    head = tl.program_id(0)
    # The blocks that see most keys come first, so that none of them is left for the end.
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    row = _row_of_block(query_start, n_decode, n_rows, block, BLOCK_TOKENS)
    row_start = tl.load(query_start + row)
    row_end = tl.load(query_start + row + 1, mask=row < n_rows, other=n_tokens)
    seq_len = tl.load(seq_lens + row, mask=row < n_rows, other=0)
    first_block = _first_block(row_start, row, n_decode, BLOCK_TOKENS)
    first_token = row_start + (block - first_block) * BLOCK_TOKENS
    if first_token >= row_end:
        return

    query = tl.arange(0, BLOCK_ROWS)
    token = first_token + query // GROUP
    dim = tl.arange(0, PADDED_DIM)
    exists = (token < row_end) & (query < BLOCK_TOKENS * GROUP)
    exists = exists[:, None] & (dim < HEAD_DIM)[None, :]
    columns = ((head * GROUP + query % GROUP) * HEAD_DIM)[:, None] + dim[None, :]
    queries = tl.load(q + token.to(tl.int64)[:, None] * q_stride + columns, exists, other=0.0)

    past = seq_len - row_end
    total, weight = _attend(
        queries,
        token + past,
        first_token + past,
        tl.maximum(tl.minimum(first_token + past + BLOCK_TOKENS, seq_len), 0),
        k_cache + head * (PAGE * HEAD_DIM),
        v_cache + head * (PAGE * HEAD_DIM),
        block_tables + row.to(tl.int64) * table_stride,
        block_stride,
        log2_scale,
        window,
        HEAD_DIM,
        PAGE,
        HAS_WINDOW,
        TILE,
    )
    # Padding has seen nothing.
    mixed = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
    mixed = mixed.to(out.dtype.element_ty)
    tl.store(out + token.to(tl.int64)[:, None] * out_stride + columns, mixed, exists)


@triton.jit
def _attend(
    queries,
    position,
    first,
    end,
    k_head,
    v_head,
    table,
    block_stride,
    log2_scale,
    window,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    TILE: tl.constexpr,
):
    """Of queries [BLOCK_ROWS, PADDED_DIM], at positions from `first` to before `end`: the values
    weighted by exp2(score - best), best being a query's largest score, and the sums of weights.
    Scores include log2(e)."""
    dim = tl.arange(0, queries.shape[1])
    best = tl.full([queries.shape[0]], _LOWEST, tl.float32)
    weight = tl.zeros([queries.shape[0]], tl.float32)
    total = tl.zeros(queries.shape, tl.float32)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(first - window + 1, 0) // TILE * TILE
    # One loop for tiles that all queries see and those that only some do: with two, ptxas finds
    # no registers for `total` that it need not move, and waits for every single matrix product.
    for start in range(begin, end, TILE):
        key = start + tl.arange(0, TILE)
        places = _places(table, start, end, block_stride, HEAD_DIM, PAGE, TILE)
        k_tile = k_head + places + dim[None, :]
        v_tile = v_head + places + dim[None, :]
        # Values past the end would spoil sums even with a weight of zero; keys are masked below.
        there = (key < end)[:, None]
        if queries.shape[1] > HEAD_DIM:
            k = tl.load(k_tile, (dim < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(v_tile, there & (dim < HEAD_DIM)[None, :], other=0.0)
        else:
            k = tl.load(k_tile)
            v = tl.load(v_tile, there, other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
        hidden = start + TILE > first + 1
        if HAS_WINDOW:
            hidden = hidden | (start < end - window)
        if hidden:
            seen = key[None, :] <= position[:, None]
            if HAS_WINDOW:
                seen = seen & (key[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1) * log2_scale)
        weights = tl.exp2(scores * log2_scale - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        weight = weight * shrink + tl.sum(weights, 1)
        total = total * shrink[:, None]
        total = tl.dot(weights.to(v.dtype), v, total, input_precision="ieee")
        best = new_best
    return total, weight


@triton.jit
def _first_block(row_start, row, n_decode, BLOCK_TOKENS: tl.constexpr):
    """Leaves every row before it enough blocks, known without knowing their lengths."""
    return (row_start - n_decode) // BLOCK_TOKENS + row - n_decode


@triton.jit
def _row_of_block(query_start, n_decode, n_rows, block, BLOCK_TOKENS: tl.constexpr):
    """The last row whose blocks begin at or before `block`; n_rows for the padding tokens."""
    low = n_decode
    high = n_rows
    while low < high:
        middle = (low + high + 1) // 2
        start = tl.load(query_start + middle)
        if _first_block(start, middle, n_decode, BLOCK_TOKENS) <= block:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _places(
    table,
    start,
    end,
    block_stride,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
):
    """int64[TILE, 1]: where the keys from `start` on begin in the pages of a head; those from `end`
    on are somewhere in pages that exist."""
    n = tl.arange(0, TILE)
    if TILE <= PAGE:
        page = tl.load(table + start // PAGE).to(tl.int64)
        return page * block_stride + start % PAGE * HEAD_DIM + (n * HEAD_DIM)[:, None]
    key = start + n
    page = tl.load(table + key // PAGE, key < end, other=0).to(tl.int64)
    return (page * block_stride + key % PAGE * HEAD_DIM)[:, None]

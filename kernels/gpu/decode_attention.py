"""Paged attention of one query token a row, split over the card (flash decoding).

Programs stay on their multiprocessors and walk over (chunk of a row, KV head) pairs of a work list
(decode_plan.py). The query heads of a KV head are the rows of one matrix product, so K and V are
read once. A row of several chunks is put together by the program that finishes last, always in
the order of chunks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagemesh.kernels.gpu.decode_combine import chunks_at_once, combine, store_heads
from pagemesh.kernels.gpu.decode_plan import DecodeConfig, Heads, plan_decode
from pagemesh.kernels.gpu.kernel import kernel
from pagemesh.kernels.gpu.launch import multiprocessors, next_power_of_2, pdl
from pagemesh.kernels.inputs import AttentionInputs

_LOG2_E: Final = 1.4426950408889634
# The fewest rows of a matrix product on tensor cores.
_MIN_ROWS: Final = 16
# Bounds of DecodeConfig.max_chunks.
_FEWEST_CHUNKS: Final = 8
_MOST_CHUNKS: Final = 64
# By the padded head dimension and an element's bytes. A tile of K is 8 to 16 KiB, and 227 KiB of
# shared memory hold the buffers of all programs. Those of 128 in 16 bits were measured by
# benchmarks/gpu/decode_attention.py on an H200, where groups of 2 and of 4 prefer the same.
_TUNED: Final = {
    (64, 2): DecodeConfig(tile_tokens=64, chunk_tokens=512, programs_per_sm=4),
    (128, 2): DecodeConfig(tile_tokens=32, chunk_tokens=512, programs_per_sm=4),
    (256, 2): DecodeConfig(tile_tokens=32, programs_per_sm=3),
    (64, 4): DecodeConfig(tile_tokens=32, programs_per_sm=4),
    (128, 4): DecodeConfig(tile_tokens=32, programs_per_sm=3),
    (256, 4): DecodeConfig(tile_tokens=16, programs_per_sm=2),
}


def choose_config(heads: Heads, dtype: torch.dtype, n_multiprocessors: int) -> DecodeConfig:
    """The tuned configuration of a layer. A lone long row is cut into about two pairs of chunk and
    KV head for each multiprocessor."""
    padded = max(64, next_power_of_2(heads.head_dim))
    max_chunks = -(-2 * n_multiprocessors // heads.n_kv_heads)
    return replace(
        _TUNED[padded, dtype.itemsize],
        max_chunks=min(_MOST_CHUNKS, max(_FEWEST_CHUNKS, max_chunks)),
    )


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    inputs: AttentionInputs,
    *,
    scale: float,
    window: int | None = None,
    out: Tensor | None = None,
    config: DecodeConfig | None = None,
) -> Tensor:
    """Attention of q [R, Hq, D] over the pages of the first R = inputs.n_decode rows; [R, Hq, D].

    As kernels.attention.paged_attention for rows of one token. q and out may be views whose last
    dimension is dense. The pools' block_tokens is a power of two. Scratch memory: see DecodePlan.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    n_rows, n_heads, head_dim = q.shape
    if n_rows == 0:
        return out
    _, n_kv_heads, block_tokens, _ = k_cache.shape
    heads = Heads(n_kv_heads, n_heads // n_kv_heads, head_dim)
    config = config or choose_config(heads, q.dtype, multiprocessors())
    plan = plan_decode(inputs, heads, window, config)
    tables = inputs.block_tables
    _decode_kernel[(config.programs,)](
        q,
        k_cache,
        v_cache,
        out,
        tables,
        plan.items,
        plan.n_items,
        plan.arrived,
        plan.sums,
        plan.peaks,
        scale * _LOG2_E,
        plan.peaks.stride(0),
        plan.max_chunks,
        tables.stride(0),
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        N_KV_HEADS=n_kv_heads,
        GROUP=heads.group,
        HEAD_DIM=head_dim,
        PAGE_BITS=block_tokens.bit_length() - 1,
        M=max(_MIN_ROWS, next_power_of_2(heads.group)),
        G=next_power_of_2(heads.group),
        D=next_power_of_2(head_dim),
        TILE=config.tile_tokens,
        COLUMNS=next_power_of_2(config.max_chunks),
        AT_ONCE=chunks_at_once(heads, config.num_warps),
        PDL=pdl(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
        launch_pdl=pdl(),
    )
    return out


@kernel(do_not_specialize=["peaks_stride", "max_chunks", "table_stride"])
def _decode_kernel(
    q,
    k_cache,
    v_cache,
    out,
    tables,
    items,
    n_items,
    arrived,
    sums,
    peaks,
    scale,
    peaks_stride,
    max_chunks,
    table_stride,
    q_stride,
    q_head_stride,
    out_stride,
    out_head_stride,
    N_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_BITS: tl.constexpr,
    M: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """`scale` includes log2(e): weights are powers of two. M, G: GROUP padded for the matrix
    product and for the rest; D: HEAD_DIM padded; COLUMNS: the most chunks of a row, padded;
    AT_ONCE: chunks whose sums are read together."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    pair = tl.program_id(0)
    row, start, stop, which = _item(items, pair, N_KV_HEADS)
    n_pairs = tl.load(n_items) * N_KV_HEADS
    while pair < n_pairs:
        # Read ahead: an item is there when its turn comes.
        next_pair = pair + tl.num_programs(0)
        next_row, next_start, next_stop, next_which = _item(items, next_pair, N_KV_HEADS)
        head = pair % N_KV_HEADS
        chunk, n_chunks = which & 0xFFFF, which >> 16
        m, d = tl.arange(0, M), tl.arange(0, D)
        query = q + row * q_stride + (head * GROUP + m[:, None]) * q_head_stride + d[None, :]
        acc, peak, weight = _attend(
            tl.load(query, mask=(m < GROUP)[:, None] & (d < HEAD_DIM)[None, :], other=0.0),
            k_cache + head * 2**PAGE_BITS * HEAD_DIM,
            v_cache + head * 2**PAGE_BITS * HEAD_DIM,
            tables + row * table_stride,
            start,
            stop,
            scale,
            N_KV_HEADS * 2**PAGE_BITS * HEAD_DIM,
            PAGE_BITS,
            HEAD_DIM,
            M,
            D,
            TILE,
        )
        result = out + row * out_stride + head * GROUP * out_head_stride
        if n_chunks == 1:
            acc = acc / tl.where(weight > 0, weight, 1.0)[:, None]
            store_heads(result, acc, out_head_stride, GROUP, HEAD_DIM, M, D)
        else:
            slot = row * N_KV_HEADS + head
            first = slot * max_chunks
            store_heads(
                sums + (first + chunk) * GROUP * HEAD_DIM, acc, HEAD_DIM, GROUP, HEAD_DIM, M, D
            )
            place = peaks + (first + chunk) * GROUP + m
            tl.store(place, peak, mask=m < GROUP)
            tl.store(place + peaks_stride, weight, mask=m < GROUP)
            # All threads' stores come before the one thread's release.
            tl.debug_barrier()
            if tl.atomic_add(arrived + slot, 1, sem="acq_rel") == n_chunks - 1:
                tl.store(arrived + slot, 0)
                whole = combine(
                    sums + first * GROUP * HEAD_DIM,
                    peaks + first * GROUP,
                    peaks_stride,
                    n_chunks,
                    GROUP,
                    HEAD_DIM,
                    G,
                    D,
                    COLUMNS,
                    AT_ONCE,
                )
                store_heads(result, whole, out_head_stride, GROUP, HEAD_DIM, G, D)
        pair, row, start, stop, which = next_pair, next_row, next_start, next_stop, next_which


@triton.jit
def _item(items, pair, N_KV_HEADS: tl.constexpr):
    """row, start, stop, chunk + (n_chunks << 16) of a pair; there is room for what is read past
    the end."""
    item = items + pair // N_KV_HEADS * 4
    return tl.load(item).to(tl.int64), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)


@triton.jit
def _attend(
    query,
    k_cache,
    v_cache,
    table,
    start,
    stop,
    scale,
    page_stride,
    PAGE_BITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
):
    """Of query [M, D] over tokens start … stop of a row: values weighted by exp2(score - peak)
    [M, D], the peaks [M] and the sums of weights [M]."""
    d = tl.arange(0, D)
    acc = tl.zeros([M, D], tl.float32)
    peak = tl.full([M], float("-inf"), tl.float32)
    # Summed over a row only at the end: a sum per tile would make the warps wait for each other.
    weights = tl.zeros([M, TILE], tl.float32)
    # Tiles begin at multiples of TILE, so that where a token is in its page follows from `offset`.
    base = start // TILE * TILE
    offset = tl.arange(0, TILE)
    page = _pages(table, base, offset, start, stop, PAGE_BITS)
    for first in range(base, stop, TILE):
        seen = _within(first + offset, start, stop)
        in_page = (first & (2**PAGE_BITS - 1) & -TILE) + (offset & (2**PAGE_BITS - 1))
        place = (
            page.to(tl.int64)[:, None] * page_stride + (in_page * HEAD_DIM)[:, None] + d[None, :]
        )
        there = seen[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(k_cache + place, mask=there, other=0.0)
        score = tl.dot(query, k.T, input_precision="ieee")
        score = tl.where(seen[None, :], score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1) * scale)
        weight = tl.exp2(score * scale - higher[:, None])
        decay = tl.exp2(peak - higher)
        v = tl.load(v_cache + place, mask=there, other=0.0)
        acc = tl.dot(weight.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        weights = weights * decay[:, None] + weight
        peak = higher
        # Read ahead: the loads of the next tile wait for nothing.
        page = _pages(table, first + TILE, offset, start, stop, PAGE_BITS)
    return acc, peak, tl.sum(weights, 1)


@triton.jit
def _pages(table, first, offset, start, stop, PAGE_BITS: tl.constexpr):
    """The pages of tokens first + offset; the null page of those outside start … stop."""
    place = table + (first >> PAGE_BITS) + (offset >> PAGE_BITS)
    return tl.load(place, mask=_within(first + offset, start, stop), other=0)


@triton.jit
def _within(token, start, stop):
    """start <= token < stop, in one comparison."""
    return (token - start).to(tl.uint32) < (stop - start).to(tl.uint32)

"""Paged attention of one query token a row, split over the card (flash decoding).

Programs stay on their multiprocessors and walk over (item, KV head) pairs of a work list
(decode_plan.py); an item is a chunk of a row, or of several rows that have the same pages there.
The query heads of a KV head, of all these rows, are the rows of one matrix product, so K and V are
read once. A row of several chunks is put together by the program that finishes last, always in
the order of chunks. A row's bits are the same alone and beside others: the sums of a row of a
matrix product have one order, wherever it stands.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from pagemesh.kernels.gpu.decode_chunk import (
    ITEM_FIELDS,
    WHOLE,
    Caches,
    Queries,
    attend,
    item_at,
    pages_of,
    query_of,
)
from pagemesh.kernels.gpu.decode_combine import Parts, Result, arrive, chunks_at_once, keep
from pagemesh.kernels.gpu.decode_plan import (
    QUERY_HEADS,
    DecodeConfig,
    DecodePlan,
    Heads,
    WorkList,
    plan_decode,
)
from pagemesh.kernels.gpu.kernel import kernel
from pagemesh.kernels.gpu.launch import multiprocessors, next_power_of_2, pdl
from pagemesh.kernels.inputs import AttentionInputs

_LOG2_E: Final = 1.4426950408889634
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
    """The tuned configuration of a layer. A lone long row is cut into one to two pairs of chunk and
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
    With inputs.counts R is the most rows there may be, and those behind the counted ones stay as
    they are.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    n_rows, n_heads, head_dim = q.shape
    if n_rows == 0:
        return out
    _, n_kv_heads, block_tokens, _ = k_cache.shape
    heads = Heads(n_kv_heads, n_heads // n_kv_heads, head_dim)
    config = config or choose_config(heads, q.dtype, multiprocessors())
    plan = plan_decode(inputs, heads, block_tokens, window, config)
    where = _Tensors(q, k_cache, v_cache, out, inputs.block_tables)
    if plan.shared.members > 1:
        _launch(where, plan, plan.shared, heads, config, scale)
    _launch(where, plan, plan.singles, heads, config, scale)
    return out


class _Tensors(NamedTuple):
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    out: Tensor
    tables: Tensor


def _launch(
    where: _Tensors,
    plan: DecodePlan,
    work: WorkList,
    heads: Heads,
    config: DecodeConfig,
    scale: float,
) -> None:
    """Compute what is on a work list. What several rows share is a launch of its own: the loop over
    tokens is slower in a kernel that does both."""
    q, out, tables = where.q, where.out, where.tables
    _decode_kernel[(config.programs,)](
        *where,
        work.items,
        work.n_items,
        plan.n_chunks,
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
        N_KV_HEADS=heads.n_kv_heads,
        GROUP=heads.group,
        HEAD_DIM=heads.head_dim,
        PAGE_BITS=where.k_cache.shape[2].bit_length() - 1,
        CHUNKED=plan.max_chunks > 1,
        MEMBERS=work.members,
        M=max(QUERY_HEADS, next_power_of_2(heads.group)),
        G=next_power_of_2(heads.group),
        D=next_power_of_2(heads.head_dim),
        TILE=config.tile_tokens,
        COLUMNS=next_power_of_2(config.max_chunks),
        AT_ONCE=chunks_at_once(heads, config.num_warps),
        PDL=pdl(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
        launch_pdl=pdl(),
    )


@kernel(do_not_specialize=["peaks_stride", "max_chunks", "table_stride"])
def _decode_kernel(
    q,
    k_cache,
    v_cache,
    out,
    tables,
    items,
    n_items,
    n_chunks,
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
    CHUNKED: tl.constexpr,
    MEMBERS: tl.constexpr,
    M: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """`scale` includes log2(e): weights are powers of two. CHUNKED: whether rows may have several
    chunks; MEMBERS: the most rows of an item; M: rows of the matrix product; G, D: GROUP and
    HEAD_DIM padded; COLUMNS: the most chunks of a row, padded; AT_ONCE: chunks whose sums are read
    together.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    parts = Parts(sums, peaks, peaks_stride, max_chunks, n_chunks, arrived)
    result = Result(out, out_stride, out_head_stride)
    caches = Caches(k_cache, v_cache, tables, table_stride)
    queries = Queries(q, q_stride, q_head_stride)
    WIDTH: tl.constexpr = ITEM_FIELDS + MEMBERS  # noqa: N806
    pair = tl.program_id(0)
    item = item_at(items + pair // N_KV_HEADS * WIDTH)
    n_pairs = tl.load(n_items) * N_KV_HEADS
    # The pair before, if it is a part of rows: what it stored is counted when the next is computed.
    # By then the stores are through, and the release need not wait for them.
    stored = -1
    while pair < n_pairs:
        place = items + pair // N_KV_HEADS * WIDTH
        # Read ahead: an item is there when its turn comes. There is room behind the last.
        next_pair = pair + tl.num_programs(0)
        next_item = item_at(items + next_pair // N_KV_HEADS * WIDTH)
        head = pair % N_KV_HEADS
        query = query_of(queries, item, place, head, GROUP, HEAD_DIM, MEMBERS, M, G, D)
        pages = pages_of(caches, item, head, N_KV_HEADS, HEAD_DIM, PAGE_BITS)
        acc, peak, weight = attend(
            query, pages, item.start, item.stop, scale, PAGE_BITS, HEAD_DIM, M, D, TILE
        )
        if CHUNKED:
            arrive(
                stored, items, parts, result,
                N_KV_HEADS, GROUP, HEAD_DIM, MEMBERS, G, D, COLUMNS, AT_ONCE,
            )  # fmt: skip
        keep(
            acc, peak, weight, item, place, head, parts, result,
            N_KV_HEADS, GROUP, HEAD_DIM, CHUNKED, MEMBERS, M, G, D,
        )  # fmt: skip
        stored = tl.where(item.which & WHOLE == WHOLE, -1, pair)
        pair, item = next_pair, next_item
    if CHUNKED:
        arrive(
            stored, items, parts, result,
            N_KV_HEADS, GROUP, HEAD_DIM, MEMBERS, G, D, COLUMNS, AT_ONCE,
        )  # fmt: skip

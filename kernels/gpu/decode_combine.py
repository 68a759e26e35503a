"""What the decode attention found, stored: a whole row's result, or a chunk's part of it until the
last of the row's chunks puts all together."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from pagemesh.kernels.gpu.decode_chunk import ITEM_FIELDS, WHOLE, query_rows
from pagemesh.kernels.gpu.decode_plan import Heads
from pagemesh.kernels.gpu.launch import next_power_of_2


class Parts(NamedTuple):
    """See DecodePlan."""

    sums: Any
    peaks: Any
    peaks_stride: Any
    max_chunks: Any
    n_chunks: Any
    arrived: Any


class Result(NamedTuple):
    out: Any
    row_stride: Any
    head_stride: Any


def chunks_at_once(heads: Heads, num_warps: int) -> int:
    """How many partial sums are read together: 32 numbers a thread."""
    numbers: int = next_power_of_2(heads.group) * next_power_of_2(heads.head_dim)
    return max(2, num_warps * 32 * 32 // numbers)


@triton.jit
def keep(
    acc,
    peak,
    weight,
    item,
    place,
    head,
    parts,
    result,
    N_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNKED: tl.constexpr,
    MEMBERS: tl.constexpr,
    M: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
):
    """Write acc [M, D], peak [M] and weight [M] of an item: its result if it is a whole row."""
    row, g, exists = query_rows(item, place, GROUP, MEMBERS, M, G)
    whole = acc / tl.where(weight > 0, weight, 1.0)[:, None]
    out = result.out + row * result.row_stride + (head * GROUP + g) * result.head_stride
    if CHUNKED:
        chunk = item.which & WHOLE
        if chunk == WHOLE:
            _store_heads(out, whole, exists, HEAD_DIM, D)
        else:
            slot = (row * N_KV_HEADS + head) * parts.max_chunks + chunk
            part = slot * GROUP + g
            _store_heads(parts.sums + part * HEAD_DIM, acc, exists, HEAD_DIM, D)
            tl.store(parts.peaks + part, peak, mask=exists)
            tl.store(parts.peaks + parts.peaks_stride + part, weight, mask=exists)
    else:
        _store_heads(out, whole, exists, HEAD_DIM, D)


@triton.jit
def arrive(
    stored,
    items,
    parts,
    result,
    N_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MEMBERS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Count what was stored for a pair (-1: nothing), and put together the rows of which it was the
    last."""
    if stored >= 0:
        place = items + stored // N_KV_HEADS * (ITEM_FIELDS + MEMBERS)
        head = stored % N_KV_HEADS
        member = tl.arange(0, MEMBERS)
        counted = member < tl.load(place + 2) >> 16
        rows = tl.load(place + ITEM_FIELDS + member, mask=counted, other=0)
        n_chunks = tl.load(parts.n_chunks + rows, mask=counted, other=0)
        slots = rows * N_KV_HEADS + head
        # All threads' stores come before the one thread's release …
        tl.debug_barrier()
        before = tl.atomic_add(parts.arrived + slots, 1, mask=counted, sem="acq_rel")
        complete = tl.sum(tl.where(counted & (before == n_chunks - 1), 1 << member, 0), 0)
        if complete != 0:
            # … and its acquisition before all threads' loads.
            tl.debug_barrier()
            for number in range(MEMBERS):
                if (complete >> number) & 1 != 0:
                    row = tl.load(place + ITEM_FIELDS + number).to(tl.int64)
                    _put_together(
                        row, head, parts, result,
                        N_KV_HEADS, GROUP, HEAD_DIM, G, D, COLUMNS, AT_ONCE,
                    )  # fmt: skip


@triton.jit
def _put_together(
    row,
    head,
    parts,
    result,
    N_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    slot = row * N_KV_HEADS + head
    tl.store(parts.arrived + slot, 0)
    first = slot * parts.max_chunks * GROUP
    whole = _combine(
        parts.sums + first * HEAD_DIM,
        parts.peaks + first,
        parts.peaks_stride,
        tl.load(parts.n_chunks + row),
        GROUP,
        HEAD_DIM,
        G,
        D,
        COLUMNS,
        AT_ONCE,
    )
    g = tl.arange(0, G)
    place = result.out + row * result.row_stride + (head * GROUP + g) * result.head_stride
    _store_heads(place, whole, g < GROUP, HEAD_DIM, D)


@triton.jit
def _combine(
    sums,
    peaks,
    peaks_stride,
    n_chunks,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """The result [G, D] of a row's chunks, of which AT_ONCE sums are read at a time."""
    g, d = tl.arange(0, G), tl.arange(0, D)
    every = tl.arange(0, MAX_CHUNKS)
    peaks_of_all = _per_head(peaks, every, n_chunks, float("-inf"), GROUP, G)
    weights = _per_head(peaks + peaks_stride, every, n_chunks, 0.0, GROUP, G)
    # Padding has no peak.
    highest = tl.where(g < GROUP, tl.max(peaks_of_all, 0), 0.0)
    weight = tl.sum(weights * tl.exp2(peaks_of_all - highest[None, :]), 0)
    acc = tl.zeros([G, D], tl.float32)
    chunk = tl.arange(0, AT_ONCE)
    offset = (chunk[:, None] * GROUP + g[None, :])[:, :, None] * HEAD_DIM + d[None, None, :]
    wide = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    for first in range(0, n_chunks, AT_ONCE):
        left = n_chunks - first
        peak = _per_head(peaks + first * GROUP, chunk, left, float("-inf"), GROUP, G)
        partial = tl.load(
            sums + first * (GROUP * HEAD_DIM) + offset,
            mask=(chunk < left)[:, None, None] & wide[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        share = tl.exp2(peak - highest[None, :])
        acc += tl.sum(partial * share[:, :, None], 0)
    return acc / tl.where(g < GROUP, weight, 1.0)[:, None]


@triton.jit
def _per_head(values, chunk, n_chunks, other, GROUP: tl.constexpr, G: tl.constexpr):
    """[chunks, G] of float32[n_chunks, GROUP], and `other` where there is none."""
    g = tl.arange(0, G)
    return tl.load(
        values + chunk[:, None] * GROUP + g[None, :],
        mask=(chunk < n_chunks)[:, None] & (g < GROUP)[None, :],
        other=other,
        cache_modifier=".cg",
    )


@triton.jit
def _store_heads(place, values, exists, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    """values [N, D] of the heads that exist, each from place [N] on."""
    d = tl.arange(0, D)
    tl.store(
        place[:, None] + d[None, :],
        values.to(place.dtype.element_ty),
        mask=exists[:, None] & (d < HEAD_DIM)[None, :],
    )

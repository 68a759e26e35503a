"""How the decode attention puts the chunks of a row together: the last steps of a row's work."""

from __future__ import annotations

import triton
import triton.language as tl

from pagemesh.kernels.gpu.decode_plan import Heads
from pagemesh.kernels.gpu.launch import next_power_of_2


def chunks_at_once(heads: Heads, num_warps: int) -> int:
    """How many partial sums are read together: 32 numbers a thread."""
    numbers: int = next_power_of_2(heads.group) * next_power_of_2(heads.head_dim)
    return max(2, num_warps * 32 * 32 // numbers)


@triton.jit
def combine(
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
def store_heads(
    place,
    values,
    head_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
):
    """values [ROWS, D] without their padding."""
    g, d = tl.arange(0, ROWS), tl.arange(0, D)
    tl.store(
        place + g[:, None] * head_stride + d[None, :],
        values.to(place.dtype.element_ty),
        mask=(g < GROUP)[:, None] & (d < HEAD_DIM)[None, :],
    )

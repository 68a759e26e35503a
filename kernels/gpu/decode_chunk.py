"""What a program of the decode attention does with one item: attention over a chunk's tokens."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import triton
import triton.language as tl

ITEM_FIELDS: Final = tl.constexpr(3)
"""Of an item of the work list (see DecodePlan), before its list of rows."""
WHOLE: Final = tl.constexpr(0xFFFF)
"""The chunk of a row that has no other."""


class Item(NamedTuple):
    """What a program knows of an item before its turn comes. The rest stays in memory: registers
    are what the loop over tokens lacks most."""

    row: Any
    """The first."""
    start: Any
    stop: Any
    which: Any


@triton.jit
def item_at(place):
    return Item(
        tl.load(place + ITEM_FIELDS), tl.load(place), tl.load(place + 1), tl.load(place + 2)
    )


class Caches(NamedTuple):
    k: Any
    v: Any
    tables: Any
    table_stride: Any


class Queries(NamedTuple):
    q: Any
    row_stride: Any
    head_stride: Any


class Pages(NamedTuple):
    """Of one KV head and one row."""

    k: Any
    v: Any
    stride: Any
    """From page to page of the pools, in elements."""
    table: Any


@triton.jit
def query_rows(
    item, place, GROUP: tl.constexpr, MEMBERS: tl.constexpr, M: tl.constexpr, G: tl.constexpr
):
    """Of the M rows of a matrix product: the batch's row, the head in its group, whether it
    exists."""
    member, head = tl.arange(0, M) // G, tl.arange(0, M) % G
    n_rows = item.which >> 16
    row = item.row + tl.zeros_like(member)
    if MEMBERS > 1:
        # The first is at hand. Nobody waits for the others where there are none.
        others = (member > 0) & (member < n_rows)
        listed = tl.load(place + ITEM_FIELDS + member, mask=others, other=0)
        row = tl.where(others, listed, row)
    return row.to(tl.int64), head, (member < n_rows) & (head < GROUP)


@triton.jit
def query_of(
    queries,
    item,
    place,
    head,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MEMBERS: tl.constexpr,
    M: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
):
    """The query heads [M, D] of an item's rows."""
    row, g, exists = query_rows(item, place, GROUP, MEMBERS, M, G)
    d = tl.arange(0, D)
    query = queries.q + row * queries.row_stride + (head * GROUP + g) * queries.head_stride
    return tl.load(
        query[:, None] + d[None, :],
        mask=exists[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )


@triton.jit
def pages_of(
    caches, item, head, N_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_BITS: tl.constexpr
):
    """Those of an item's first row: all its rows have them in the chunk."""
    page = 2**PAGE_BITS * HEAD_DIM
    return Pages(
        caches.k + head * page,
        caches.v + head * page,
        N_KV_HEADS * page,
        caches.tables + item.row.to(tl.int64) * caches.table_stride,
    )


@triton.jit
def attend(
    query,
    pages,
    start,
    stop,
    scale,
    PAGE_BITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
):
    """Of query [M, D] over tokens start … stop of a row: values weighted by exp2(score - peak)
    [M, D], the peaks [M] and the sums of weights [M]. The bits of one of the M do not depend on
    where it stands."""
    d = tl.arange(0, D)
    acc = tl.zeros([M, D], tl.float32)
    peak = tl.full([M], float("-inf"), tl.float32)
    # Summed over a row only at the end: a sum per tile would make the warps wait for each other.
    weights = tl.zeros([M, TILE], tl.float32)
    # Tiles begin at multiples of TILE, so that where a token is in its page follows from `offset`.
    base = start // TILE * TILE
    offset = tl.arange(0, TILE)
    page = _pages(pages.table, base, offset, start, stop, PAGE_BITS)
    for first in range(base, stop, TILE):
        seen = _within(first + offset, start, stop)
        in_page = (first & (2**PAGE_BITS - 1) & -TILE) + (offset & (2**PAGE_BITS - 1))
        place = (
            page.to(tl.int64)[:, None] * pages.stride + (in_page * HEAD_DIM)[:, None] + d[None, :]
        )
        there = seen[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(pages.k + place, mask=there, other=0.0)
        score = tl.dot(query, k.T, input_precision="ieee")
        score = tl.where(seen[None, :], score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1) * scale)
        weight = tl.exp2(score * scale - higher[:, None])
        decay = tl.exp2(peak - higher)
        v = tl.load(pages.v + place, mask=there, other=0.0)
        acc = tl.dot(weight.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        weights = weights * decay[:, None] + weight
        peak = higher
        # Read ahead: the loads of the next tile wait for nothing.
        page = _pages(pages.table, first + TILE, offset, start, stop, PAGE_BITS)
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

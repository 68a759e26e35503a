"""Attention over pages, one tile of keys at a time (FlashAttention's running softmax; Dao, 2023).

Tiles begin at multiples of TILE_KEYS tokens of the sequence, whatever is asked of it, and a query's
numbers never meet another query's: a token's result has the same bits whether it was computed in a
decode step, in one prompt chunk or another.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from pagemesh.kernels.cpu.exponential import exp
from pagemesh.kernels.cpu.jit import LANES, inlined, part
from pagemesh.kernels.cpu.page_tile import PAGE_COLUMNS, add_values, score_keys
from pagemesh.kernels.cpu.simd import (
    add,
    first_of,
    fma,
    larger,
    largest_of,
    load,
    mul,
    only_between,
    splat,
    store,
    sub,
    sum_of,
)
from pagemesh.kernels.cpu.tile import PANEL, add_product, product

TILE_KEYS: Final = 64
_QUERY_ROWS: Final = 48
_ZERO: Final = np.float32(0.0)
_ONE: Final = np.float32(1.0)
_NEVER: Final = np.float32(-np.inf)


def query_tokens(group: int) -> int:
    """Tokens of one item, for `group` query heads to a KV head."""
    return max(1, _QUERY_ROWS // group)


def scratch_elements(group: int, head_dim: int) -> int:
    """What `attend` needs for itself."""
    rows, wide = group * query_tokens(group), _padded(head_dim)
    return rows * (head_dim + wide + TILE_KEYS + 2) + TILE_KEYS * (head_dim + wide)


def _padded(head_dim: int) -> int:
    return -(-head_dim // PANEL) * PANEL


@part
def attend(
    x, x_at, x_stride, first, count, group, head_dim, scale, window,
    pool, k_pages, v_pages, page_stride, table, block_tokens, scratch, s, out, out_at, out_stride,
):  # fmt: skip
    """Queries of `count` tokens from position `first` on, `group` heads that share a KV head.

    x: the heads [count, group, head_dim], rows `x_stride` apart; out likewise. K and V pages of the
    KV head begin at `k_pages` and `v_pages` of the pool, `page_stride` apart by block number, and
    `table` lists the sequence's blocks. `window` in tokens, 0 for none.
    """
    rows, wide = count * group, (head_dim + PANEL - 1) // PANEL * PANEL
    q = s
    total = q + rows * head_dim
    scores = total + rows * wide
    keys = scores + rows * TILE_KEYS
    values = keys + TILE_KEYS * head_dim
    best = values + TILE_KEYS * wide
    weight = best + rows
    _load_queries(x, x_at, x_stride, count, group, head_dim, scale, scratch, q)
    for r in range(rows):
        scratch[best + r], scratch[weight + r] = _NEVER, _ZERO
        for c in range(0, wide, LANES):
            store(scratch, total + r * wide + c, LANES, splat(_ZERO))
    in_place = count == 1 and block_tokens % LANES == 0 and head_dim % PAGE_COLUMNS == 0
    oldest = max(0, first - window + 1) if window else 0
    for tile in range(oldest // TILE_KEYS * TILE_KEYS, first + count, TILE_KEYS):
        n_keys = min(TILE_KEYS, first + count - tile)
        if in_place:
            _score_pages(pool, k_pages, page_stride, table, block_tokens, head_dim, tile, n_keys,
                         scratch, q, scores, rows)  # fmt: skip
        else:
            _load_keys(pool, k_pages, page_stride, table, block_tokens, head_dim, tile, n_keys,
                       scratch, keys)  # fmt: skip
            for p in range(0, n_keys, PANEL):
                product(scratch, scores + p, TILE_KEYS, scratch, q, head_dim, scratch,
                        keys + p * head_dim, head_dim, rows)  # fmt: skip
        for r in range(rows):
            position = first + r // group
            low = position - window + 1 - tile if window else 0
            _softmax(scratch, scores + r * TILE_KEYS, low, min(n_keys, position + 1 - tile),
                     best + r, weight + r, total + r * wide, wide)  # fmt: skip
        if in_place:
            low = max(0, first - window + 1 - tile) if window else 0
            _mix_pages(pool, v_pages, page_stride, table, block_tokens, head_dim, tile, low, n_keys,
                       scratch, scores, total, rows)  # fmt: skip
        else:
            _load_values(pool, v_pages, page_stride, table, block_tokens, head_dim, tile, n_keys,
                         scratch, values)  # fmt: skip
            seen_by_all = tile + n_keys <= first + 1 and not window
            if seen_by_all or _are_finite(scratch, values, n_keys, wide):
                for p in range(0, wide, PANEL):
                    add_product(scratch, total + p, wide, scratch, scores, TILE_KEYS, scratch,
                                values + p * TILE_KEYS, n_keys, rows)  # fmt: skip
            else:
                _mix_seen(scratch, scores, values, total, wide, tile, n_keys, first, group, window,
                          rows)  # fmt: skip
    for r in range(rows):
        share = splat(_ONE / scratch[weight + r])
        to = out_at + r // group * out_stride + r % group * head_dim
        for c in range(0, head_dim, LANES):
            mixed = mul(load(scratch, total + r * wide + c, LANES), share)
            store(out, to + c, head_dim - c, mixed)


@inlined
def _load_queries(x, x_at, x_stride, count, group, head_dim, scale, scratch, q):
    factor = splat(scale)
    for i in range(count):
        for c in range(0, group * head_dim, LANES):
            left = group * head_dim - c
            lanes = mul(load(x, x_at + i * x_stride + c, left), factor)
            store(scratch, q + i * group * head_dim + c, left, lanes)


@inlined
def _score_pages(
    pool, pages, stride, table, block_tokens, head_dim, tile, n_keys, scratch, q, scores, rows
):
    """Scores of a tile's keys; what stands behind the last is not a number that anyone may use."""
    for c in range(0, n_keys, PAGE_COLUMNS):
        first = pages + _key_at(tile + c, stride, table, block_tokens)
        b1, b2, b3 = first, first, first
        if c + LANES < n_keys:
            b1 = pages + _key_at(tile + c + LANES, stride, table, block_tokens)
        if c + 2 * LANES < n_keys:
            b2 = pages + _key_at(tile + c + 2 * LANES, stride, table, block_tokens)
        if c + 3 * LANES < n_keys:
            b3 = pages + _key_at(tile + c + 3 * LANES, stride, table, block_tokens)
        score_keys(scratch, scores + c, TILE_KEYS, scratch, q, head_dim, pool,
                   first, b1, b2, b3, block_tokens, head_dim, rows)  # fmt: skip


@part
def _are_finite(scratch, values, n_keys, wide):
    """Whether a tile's values are all finite. (x * 0 is NaN for NaN and infinity.)"""
    zeros = splat(_ZERO)
    for p in range(0, wide, PANEL):
        for c in range(0, n_keys * PANEL, LANES):
            zeros = fma(load(scratch, values + p * TILE_KEYS + c, LANES), splat(_ZERO), zeros)
    return sum_of(zeros) == _ZERO


@part
def _mix_seen(scratch, scores, values, total, wide, tile, n_keys, first, group, window, rows):
    """Add each row's own values only: those it does not see weigh nothing, but nothing times NaN
    would spoil it, and a token must not spoil those before it."""
    for r in range(rows):
        position = first + r // group
        low = max(0, position - window + 1 - tile) if window else 0
        high = min(n_keys, position + 1 - tile)
        for p in range(0, wide if low < high else 0, PANEL):
            add_product(
                scratch,
                total + r * wide + p,
                wide,
                scratch,
                scores + r * TILE_KEYS + low,
                TILE_KEYS,
                scratch,
                values + p * TILE_KEYS + low * PANEL,
                high - low,
                1,
            )


@inlined
def _key_at(position, stride, table, block_tokens):
    return table[position // block_tokens] * stride + position % block_tokens


@inlined
def _mix_pages(
    pool,
    pages,
    stride,
    table,
    block_tokens,
    head_dim,
    tile,
    j,
    n_keys,
    scratch,
    scores,
    total,
    rows,
):
    """Add a tile's values from the j-th on by their weights."""
    while j < n_keys:
        block, offset = divmod(tile + j, block_tokens)
        run = min(block_tokens - offset, n_keys - j)
        page = pages + table[block] * stride + offset * head_dim
        for c in range(0, head_dim, PAGE_COLUMNS):
            add_values(scratch, total + c, head_dim, scratch, scores + j, TILE_KEYS,
                       pool, page + c, head_dim, run, rows)  # fmt: skip
        j += run


@part
def _load_keys(pool, pages, stride, table, block_tokens, head_dim, tile, n_keys, scratch, keys):
    """Panels [head_dim, PANEL] of a tile's keys, zeros past the last: a page may still hold the NaN
    of the sequence that owned it before."""
    for p in range(0, n_keys, PANEL):
        panel, end = keys + p * head_dim, min(PANEL, n_keys - p)
        if end < PANEL:
            for c in range(0, PANEL * head_dim, LANES):
                store(scratch, panel + c, LANES, splat(_ZERO))
        j = 0
        while j < end:
            block, offset = divmod(tile + p + j, block_tokens)
            run = min(block_tokens - offset, end - j)
            page = pages + table[block] * stride + offset
            for c in range(0, run, LANES):
                _copy(pool, page + c, block_tokens, run - c,
                      scratch, panel + j + c, PANEL, run - c, head_dim)  # fmt: skip
            j += run


@part
def _load_values(pool, pages, stride, table, block_tokens, head_dim, tile, n_keys, scratch, values):
    """Panels [n_keys, PANEL] of a tile's values, one for every PANEL elements of a head."""
    wide = (head_dim + PANEL - 1) // PANEL * PANEL
    j = 0
    while j < n_keys:
        block, offset = divmod(tile + j, block_tokens)
        run = min(block_tokens - offset, n_keys - j)
        page = pages + table[block] * stride + offset * head_dim
        for c in range(0, wide, LANES):
            to = values + (c // PANEL * TILE_KEYS + j) * PANEL + c % PANEL
            _copy(pool, page + c, head_dim, head_dim - c, scratch, to, PANEL, LANES, run)
        j += run


@inlined
def _copy(source, at, stride, count, target, to, target_stride, room, rows):
    """`rows` rows of up to LANES elements: the first `count`, then zeros, the first `room` of which
    are written. Nearly always whole vectors, in a loop of its own that the compiler keeps tight.
    """
    if count >= LANES and room >= LANES:
        for r in range(rows):
            store(target, to + r * target_stride, LANES, load(source, at + r * stride, LANES))
    else:
        for r in range(rows):
            lanes = load(source, at + r * stride, count)
            store(target, to + r * target_stride, room, lanes)


@inlined
def _softmax(scratch, scores, low, high, best_at, weight_at, total, wide):
    """Turn a row of scores into weights under the best score so far; keys outside low to high - 1
    weigh nothing. What was summed under an older best is scaled down."""
    tile_best = splat(_NEVER)
    for c in range(0, TILE_KEYS, LANES):
        lanes = only_between(load(scratch, scores + c, LANES), low - c, high - c, _NEVER)
        store(scratch, scores + c, LANES, lanes)
        tile_best = larger(tile_best, lanes)
    old = scratch[best_at]
    new = max(old, largest_of(tile_best))
    if new == _NEVER:
        for c in range(0, TILE_KEYS, LANES):
            store(scratch, scores + c, LANES, splat(_ZERO))
        return
    weights = splat(_ZERO)
    for c in range(0, TILE_KEYS, LANES):
        lanes = exp(sub(load(scratch, scores + c, LANES), splat(new)))
        store(scratch, scores + c, LANES, lanes)
        weights = add(weights, lanes)
    shrink = first_of(exp(splat(old - new)))
    scratch[best_at] = new
    scratch[weight_at] = scratch[weight_at] * shrink + sum_of(weights)
    if shrink != _ONE:
        for c in range(0, wide, LANES):
            lanes = mul(load(scratch, total + c, LANES), splat(shrink))
            store(scratch, total + c, LANES, lanes)

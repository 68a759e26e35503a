"""The two kernels that make the work list of the decode attention (decode_plan.py).

A row is cut at multiples of the chunk size, so that rows of different lengths are cut alike. The
first kernel finds for each chunk, the last of a row aside, the first row that has the same pages
there: it compares the chunk's last pages with those of all rows, then every page with that row's.
The second makes one item of several such rows: of as many as leave the card enough items.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from pagemesh.kernels.gpu.kernel import kernel

ITEM_FIELDS: Final = tl.constexpr(4)
"""Of an item, before its list of rows."""
ROWS: Final = tl.constexpr(16)
"""Of a program."""
_AT_ONCE: Final = tl.constexpr(128)
"""Rows that a program compares its own with at a time."""
_PAGES: Final = tl.constexpr(32)
"""Likewise of pages."""
_RUN_TIME: Final = ["n_rows", "window", "chunk_tokens", "most_chunks"]


@kernel(do_not_specialize=["table_stride", *_RUN_TIME])
def match_kernel(
    seq_lens,
    tables,
    items,
    n_inner,
    n_chunks,
    leaders,
    arrived,
    table_stride,
    n_rows,
    window,
    chunk_tokens,
    most_chunks,
    N_KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE_BITS: tl.constexpr,
    MEMBERS: tl.constexpr,
    PDL: tl.constexpr,
):
    """What is known of each of ROWS rows by itself, and for every so many of their chunks the
    leaders."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    mine = tl.program_id(0) * ROWS
    rows = mine + tl.arange(0, ROWS)
    first, lens, size, n_mine = _cut(seq_lens, rows, n_rows, window, chunk_tokens, most_chunks)
    if tl.program_id(1) == 0:
        tl.store(n_inner, 0)
        tl.store(n_inner + 1, 0)
        is_row = rows < n_rows
        tl.store(n_chunks + rows, n_mine, mask=is_row)
        chunk = tl.where(n_mine > 1, n_mine - 1, -1)
        start = first + tl.maximum(chunk, 0) * size
        item = items + rows * (ITEM_FIELDS + MEMBERS)
        _write_item(item, start, lens, chunk, 1, is_row)
        tl.store(item + ITEM_FIELDS, rows, mask=is_row)
        head = tl.arange(0, HEADS)
        counter = arrived + rows[:, None] * N_KV_HEADS + head[None, :]
        counted = is_row[:, None] & (head < N_KV_HEADS)[None, :]
        tl.store(counter, tl.zeros([ROWS, HEADS], tl.int32), mask=counted)
    if MEMBERS > 1:
        for column in range(tl.program_id(1), tl.max(n_mine, 0) - 1, tl.num_programs(1)):
            inner = column < n_mine - 1
            leader = rows
            last = tables + rows * table_stride + (((column + 1) * size - 1) >> PAGE_BITS)
            key = tl.load(last, mask=inner, other=-1)
            for begin in range(0, mine + ROWS, _AT_ONCE):
                others = begin + tl.arange(0, _AT_ONCE)
                _, _, sizes, n_others = _cut(
                    seq_lens, others, n_rows, window, chunk_tokens, most_chunks
                )
                lasts = tables + others * table_stride + (((column + 1) * sizes - 1) >> PAGE_BITS)
                keys = tl.load(lasts, mask=column < n_others - 1, other=-2)
                same = (key[:, None] == keys[None, :]) & (size[:, None] == sizes[None, :])
                leader = tl.minimum(leader, tl.min(tl.where(same, others[None, :], n_rows), 1))
            equal = _equal_pages(tables, table_stride, rows, leader, column * size, size, PAGE_BITS)
            leader = tl.where(equal, leader, rows)
            tl.store(leaders + column * n_rows + rows, leader, mask=inner)


@triton.jit
def _equal_pages(tables, table_stride, rows, others, start, size, PAGE_BITS: tl.constexpr):
    """Whether each row has the pages of the other one where its tokens start … start + size are."""
    begin = start >> PAGE_BITS
    n_pages = tl.where(others != rows, ((start + size - 1) >> PAGE_BITS) + 1 - begin, 0)
    page = tl.arange(0, _PAGES)
    differ = tl.zeros([ROWS, _PAGES], tl.int32)
    for i in range(0, tl.max(n_pages, 0), _PAGES):
        place = begin[:, None] + i + page[None, :]
        there = (i + page)[None, :] < n_pages[:, None]
        one = tl.load(tables + rows[:, None] * table_stride + place, mask=there, other=0)
        other = tl.load(tables + others[:, None] * table_stride + place, mask=there, other=0)
        differ |= one ^ other
    return tl.max(tl.where(differ != 0, 1, 0), 1) == 0


@kernel(do_not_specialize=["full_card", "last", *_RUN_TIME])
def group_kernel(
    seq_lens,
    items,
    n_inner,
    n_chunks,
    leaders,
    full_card,
    last,
    n_rows,
    window,
    chunk_tokens,
    most_chunks,
    MEMBERS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The items of all chunks but the last of ROWS rows. `full_card`: items that give each program
    of the decode attention something to do."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    mine = tl.program_id(0) * ROWS
    rows = mine + tl.arange(0, ROWS)
    first, _, size, n_mine = _cut(seq_lens, rows, n_rows, window, chunk_tokens, most_chunks)
    n_columns = tl.max(n_mine, 0) - 1
    if tl.program_id(1) < n_columns:
        members = _members(n_chunks, n_rows, full_card, MEMBERS)
        for column in range(tl.program_id(1), n_columns, tl.num_programs(1)):
            inner = column < n_mine - 1
            single, shared = inner, inner & False
            if MEMBERS > 1:
                leader = tl.load(leaders + column * n_rows + rows, mask=inner, other=-1)
                before, after = tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32)
                for begin in range(0, n_rows, _AT_ONCE):
                    others, same = _same(leaders, n_chunks, leader, begin, column, n_rows)
                    earlier = others[None, :] < rows[:, None]
                    before += tl.sum((same & earlier).to(tl.int32), 1)
                    after += tl.sum((same & ~earlier).to(tl.int32), 1)
                leads = inner & (before % members == 0)
                n_listed = tl.minimum(after, members)
                single, shared = leads & (n_listed == 1), leads & (n_listed > 1)
            start = first + column * size
            item = items + (last - _take(n_inner + 1, single)) * (ITEM_FIELDS + MEMBERS)
            _write_item(item, start, start + size, column, 1, single)
            tl.store(item + ITEM_FIELDS, rows, mask=single)
            if MEMBERS > 1 and tl.max(shared.to(tl.int32), 0) > 0:
                item = items + (n_rows + _take(n_inner, shared)) * (ITEM_FIELDS + MEMBERS)
                _write_item(item, start, start + size, column, n_listed, shared)
                listed = tl.zeros([ROWS], tl.int32)
                for begin in range(mine, n_rows, _AT_ONCE):
                    others, same = _same(leaders, n_chunks, leader, begin, column, n_rows)
                    same = same & (others[None, :] >= rows[:, None]) & shared[:, None]
                    ones = same.to(tl.int32)
                    number = listed[:, None] + tl.cumsum(ones, 1) - 1
                    tl.store(
                        item[:, None] + ITEM_FIELDS + number,
                        others[None, :] + tl.zeros_like(number),
                        mask=same & (number < members),
                    )
                    listed += tl.sum(ones, 1)


@triton.jit
def _take(counter, wanted):
    """A number for each that is wanted, in order."""
    ones = wanted.to(tl.int32)
    return tl.atomic_add(counter, tl.sum(ones, 0)) + tl.cumsum(ones, 0) - 1


@triton.jit
def _same(leaders, n_chunks, leader, begin, column, n_rows):
    """The rows from `begin` on, and which of them have the leader that each of ROWS rows has."""
    others = begin + tl.arange(0, _AT_ONCE)
    there = column < tl.load(n_chunks + others, mask=others < n_rows, other=0) - 1
    theirs = tl.load(leaders + column * n_rows + others, mask=there, other=-2)
    return others, leader[:, None] == theirs[None, :]


@triton.jit
def _members(n_chunks, n_rows, full_card, MEMBERS: tl.constexpr):
    """How many rows are computed together, so that the card has enough to do."""
    n = tl.zeros([_AT_ONCE], tl.int32)
    for begin in range(0, n_rows, _AT_ONCE):
        others = begin + tl.arange(0, _AT_ONCE)
        n += tl.load(n_chunks + others, mask=others < n_rows, other=0)
    return tl.minimum(tl.maximum(tl.sum(n, 0) // full_card, 1), MEMBERS)


@triton.jit
def _write_item(item, start, stop, chunk, n_listed, exists):
    tl.store(item, start, mask=exists)
    tl.store(item + 1, stop, mask=exists)
    tl.store(item + 2, chunk, mask=exists)
    tl.store(item + 3, n_listed, mask=exists)


@triton.jit
def _cut(seq_lens, rows, n_rows, window, chunk_tokens, most_chunks):
    """Of each row: its first token seen, its length, a chunk's tokens, and how many chunks."""
    lens = tl.load(seq_lens + rows, mask=rows < n_rows, other=0)
    first = tl.where(window > 0, tl.maximum(lens - window, 0), 0)
    seen = lens - first
    size = chunk_tokens * _power_of_2_from(tl.cdiv(seen, chunk_tokens * most_chunks))
    n_chunks = tl.where(2 * seen > 3 * size, tl.cdiv(seen, size), 1)
    return first, lens, size, tl.where(rows < n_rows, n_chunks, 0)


@triton.jit
def _power_of_2_from(n):
    """The smallest power of two that is at least n, a number of less than 17 bits."""
    below = tl.maximum(n, 1) - 1
    below |= below >> 1
    below |= below >> 2
    below |= below >> 4
    below |= below >> 8
    return below + 1

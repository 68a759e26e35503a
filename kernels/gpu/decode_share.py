"""The two kernels that make the work list of the decode attention (decode_plan.py).

A row is cut at multiples of the chunk size, so that rows of different lengths are cut alike. The
first kernel finds for each chunk, the last of a row aside, the first row that has the same pages
there: it compares the chunk's last pages with those of all rows, then every page with that row's.
The second makes one item of several such rows: of as many as leave the card enough items.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import triton
import triton.language as tl

from pagemesh.kernels.gpu.decode_chunk import ITEM_FIELDS, WHOLE
from pagemesh.kernels.gpu.kernel import kernel

ROWS: Final = tl.constexpr(16)
"""Of a program."""
_AT_ONCE: Final = tl.constexpr(128)
"""Rows that a program compares its own with at a time."""
_PAGES: Final = tl.constexpr(32)
"""Likewise of pages."""
_RUN_TIME: Final = ["n_rows", "window", "chunk_tokens", "most_chunks"]


class Cut(NamedTuple):
    """What the chunks of rows follow from."""

    seq_lens: Any
    n_rows: Any
    window: Any
    """In tokens; 0 where there is none."""
    chunk_tokens: Any
    most_chunks: Any


class Alike(NamedTuple):
    """Of all rows in one column, the chunks of the same number."""

    leaders: Any
    n_chunks: Any
    column: Any
    n_rows: Any


@kernel(do_not_specialize=["table_stride", *_RUN_TIME])
def match_kernel(
    seq_lens,
    tables,
    singles,
    n_singles,
    n_shared,
    n_chunks,
    leaders,
    arrived,
    table_stride,
    n_rows,
    counts,
    window,
    chunk_tokens,
    most_chunks,
    N_KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE_BITS: tl.constexpr,
    MEMBERS: tl.constexpr,
    COUNTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of ROWS rows all that does not depend on the others, and of each of their chunks but the last
    the leader. HEADS: N_KV_HEADS padded."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if COUNTED:
        n_rows = tl.load(counts + 1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cut = Cut(seq_lens, n_rows, window, chunk_tokens, most_chunks)
    first, size, n_mine = _chunks(cut, rows)
    if tl.program_id(1) == 0:
        tl.store(n_singles, n_rows)
        tl.store(n_shared, 0)
        is_row = rows < n_rows
        tl.store(n_chunks + rows, n_mine, mask=is_row)
        chunk = n_mine - 1
        stop = tl.load(seq_lens + rows, mask=is_row, other=0)
        item = singles + rows * (ITEM_FIELDS + 1)
        number = tl.where(chunk > 0, chunk, WHOLE)
        _write_item(item, first + chunk * size, stop, number, 1, rows, is_row)
        head = tl.arange(0, HEADS)
        counter = arrived + rows[:, None] * N_KV_HEADS + head[None, :]
        tl.store(counter, 0, mask=is_row[:, None] & (head < N_KV_HEADS)[None, :])
    if MEMBERS > 1:
        for column in range(tl.program_id(1), tl.max(n_mine, 0) - 1, tl.num_programs(1)):
            inner = column < n_mine - 1
            leader = _first_alike(tables, table_stride, cut, rows, column, size, inner, PAGE_BITS)
            alike = _equal_pages(tables, table_stride, rows, leader, column * size, size, PAGE_BITS)
            tl.store(leaders + column * n_rows + rows, tl.where(alike, leader, rows), mask=inner)


@triton.jit
def _first_alike(tables, table_stride, cut, rows, column, size, inner, PAGE_BITS: tl.constexpr):
    """For each of ROWS rows the first with the same last page of the chunk, maybe itself."""
    leader = rows
    page = _last_page(tables, table_stride, rows, column, size, inner, -1, PAGE_BITS)
    for begin in range(0, tl.max(rows, 0) + 1, _AT_ONCE):
        others = begin + tl.arange(0, _AT_ONCE)
        _, sizes, n_others = _chunks(cut, others)
        pages = _last_page(
            tables, table_stride, others, column, sizes, column < n_others - 1, -2, PAGE_BITS
        )
        alike = (page[:, None] == pages[None, :]) & (size[:, None] == sizes[None, :])
        leader = tl.minimum(leader, tl.min(tl.where(alike, others[None, :], cut.n_rows), 1))
    return leader


@triton.jit
def _last_page(tables, table_stride, rows, column, size, exists, other, PAGE_BITS: tl.constexpr):
    place = ((column + 1) * size - 1) >> PAGE_BITS
    table = tables + rows.to(tl.int64) * table_stride
    return tl.load(table + place, mask=exists, other=other)


@triton.jit
def _equal_pages(tables, table_stride, rows, others, start, size, PAGE_BITS: tl.constexpr):
    """Whether each row has the pages of the other one where its tokens start … start + size are."""
    begin = start >> PAGE_BITS
    n_pages = tl.where(others != rows, ((start + size - 1) >> PAGE_BITS) + 1 - begin, 0)
    page = tl.arange(0, _PAGES)
    mine = tables + rows.to(tl.int64) * table_stride
    theirs = tables + others.to(tl.int64) * table_stride
    differ = tl.zeros([ROWS, _PAGES], tl.int32)
    for i in range(0, tl.max(n_pages, 0), _PAGES):
        place = begin[:, None] + i + page[None, :]
        there = (i + page)[None, :] < n_pages[:, None]
        one = tl.load(mine[:, None] + place, mask=there, other=0)
        other = tl.load(theirs[:, None] + place, mask=there, other=0)
        differ |= one ^ other
    return tl.max(tl.where(differ != 0, 1, 0), 1) == 0


@kernel(do_not_specialize=["full_card", *_RUN_TIME])
def group_kernel(
    seq_lens,
    singles,
    n_singles,
    shared,
    n_shared,
    n_chunks,
    leaders,
    full_card,
    n_rows,
    counts,
    window,
    chunk_tokens,
    most_chunks,
    MEMBERS: tl.constexpr,
    COUNTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The items of all chunks but the last of ROWS rows. `full_card`: items that give each program
    of the decode attention something to do."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if COUNTED:
        n_rows = tl.load(counts + 1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first, size, n_mine = _chunks(Cut(seq_lens, n_rows, window, chunk_tokens, most_chunks), rows)
    n_columns = tl.max(n_mine, 0) - 1
    if tl.program_id(1) < n_columns:
        members = _members(n_chunks, n_rows, full_card, MEMBERS)
        for column in range(tl.program_id(1), n_columns, tl.num_programs(1)):
            alone = column < n_mine - 1
            start = first + column * size
            if MEMBERS > 1:
                alike = Alike(leaders + column * n_rows, n_chunks, column, n_rows)
                leader = tl.load(alike.leaders + rows, mask=alone, other=-1)
                before, after = _count(alike, rows, leader)
                n_listed = tl.minimum(after, members)
                leads = alone & (before % members == 0)
                alone, together = leads & (n_listed == 1), leads & (n_listed > 1)
                item = shared + _take(n_shared, together) * (ITEM_FIELDS + MEMBERS)
                _write_item(item, start, start + size, column, n_listed, rows, together)
                listing = tl.where(together, leader, -1)
                _list(item + ITEM_FIELDS, alike, rows, listing, members)
            item = singles + _take(n_singles, alone) * (ITEM_FIELDS + 1)
            _write_item(item, start, start + size, column, 1, rows, alone)


@triton.jit
def _count(alike, rows, leader):
    """How many rows before each of ROWS rows have its leader, and how many from it on."""
    before, after = tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32)
    for begin in range(0, alike.n_rows, _AT_ONCE):
        others, same = _same(alike, leader, begin)
        earlier = others[None, :] < rows[:, None]
        before += tl.sum((same & earlier).to(tl.int32), 1)
        after += tl.sum((same & ~earlier).to(tl.int32), 1)
    return before, after


@triton.jit
def _list(place, alike, rows, leader, members):
    """Write the next `members` rows with the leader of each of ROWS rows, itself included."""
    n_listed = tl.zeros([ROWS], tl.int32)
    end = tl.where(tl.max(leader, 0) < 0, 0, alike.n_rows)
    for begin in range(tl.min(rows, 0), end, _AT_ONCE):
        others, same = _same(alike, leader, begin)
        ones = (same & (others[None, :] >= rows[:, None])).to(tl.int32)
        number = n_listed[:, None] + tl.cumsum(ones, 1) - 1
        listed = (ones > 0) & (number < members)
        tl.store(place[:, None] + number, others[None, :], mask=listed)
        n_listed += tl.sum(ones, 1)


@triton.jit
def _same(alike, leader, begin):
    """The rows from `begin` on, and which of them have the leader of each of ROWS rows."""
    others = begin + tl.arange(0, _AT_ONCE)
    n_chunks = tl.load(alike.n_chunks + others, mask=others < alike.n_rows, other=0)
    theirs = tl.load(alike.leaders + others, mask=alike.column < n_chunks - 1, other=-2)
    return others, leader[:, None] == theirs[None, :]


@triton.jit
def _take(counter, wanted):
    """A number for each that is wanted, in order."""
    ones = wanted.to(tl.int32)
    return tl.atomic_add(counter, tl.sum(ones, 0)) + tl.cumsum(ones, 0) - 1


@triton.jit
def _members(n_chunks, n_rows, full_card, MEMBERS: tl.constexpr):
    """How many rows are computed together, so that the card has enough to do."""
    n = tl.zeros([_AT_ONCE], tl.int32)
    for begin in range(0, n_rows, _AT_ONCE):
        others = begin + tl.arange(0, _AT_ONCE)
        n += tl.load(n_chunks + others, mask=others < n_rows, other=0)
    return tl.minimum(tl.maximum(tl.sum(n, 0) // full_card, 1), MEMBERS)


@triton.jit
def _write_item(item, start, stop, chunk, n_listed, row, exists):
    """All but the rows after the first."""
    tl.store(item, start, mask=exists)
    tl.store(item + 1, stop, mask=exists)
    tl.store(item + 2, chunk + (n_listed << 16), mask=exists)
    tl.store(item + ITEM_FIELDS, row, mask=exists)


@triton.jit
def _chunks(cut, rows):
    """Of each row: its first token seen, a chunk's tokens, and how many chunks."""
    lens = tl.load(cut.seq_lens + rows, mask=rows < cut.n_rows, other=0)
    first = tl.where(cut.window > 0, tl.maximum(lens - cut.window, 0), 0)
    seen = lens - first
    size = cut.chunk_tokens * _power_of_2_from(tl.cdiv(seen, cut.chunk_tokens * cut.most_chunks))
    n_chunks = tl.where(2 * seen > 3 * size, tl.cdiv(seen, size), 1)
    return first, size, tl.where(rows < cut.n_rows, n_chunks, 0)


@triton.jit
def _power_of_2_from(n):
    """The smallest power of two that is at least n, a number of less than 17 bits."""
    below = tl.maximum(n, 1) - 1
    below |= below >> 1
    below |= below >> 2
    below |= below >> 4
    below |= below >> 8
    return below + 1

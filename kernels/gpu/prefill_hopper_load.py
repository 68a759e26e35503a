"""The work of the prefill attention for Hopper, and the warp that loads for it.

All parts of a program walk the same list of work in the same order, so that nobody needs to tell
the others what comes next.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Queries of a warpgroup: the matrix instruction's rows.
ROWS = gl.constexpr(64)
# 16-bit elements in the 128 bytes of a swizzled row of shared memory.
PANEL = gl.constexpr(64)


@dataclass(frozen=True, slots=True)
class Cut:
    """What the kernel is compiled for."""

    group: int
    """Query heads of a KV head."""
    pack: int
    """Of these, the ones that a piece of work computes: a power of two."""
    bundles: int
    """Pieces of work for the same tokens: query heads / pack."""
    page: int
    head_dim: int
    tile: int
    stages: int
    """Of keys, and of values."""
    query_stages: int
    warpgroups: int
    turns: bool
    windowed: bool

    @property
    def constants(self) -> dict[str, int]:
        """By the names that the kernel has for them."""
        return {field.name.upper(): getattr(self, field.name) for field in fields(self)}

    @property
    def wg_tokens(self) -> int:
        return 64 // self.pack

    @property
    def block_tokens(self) -> int:
        return self.wg_tokens * self.warpgroups

    @property
    def panels(self) -> int:
        """A row of head_dim elements lies in shared memory as this many of 128 bytes."""
        return self.head_dim // 64

    @property
    def box(self) -> int:
        """Keys that one copy brings."""
        return min(self.page, self.tile)

    @property
    def boxes(self) -> int:
        return self.tile // self.box

    @property
    def score_layout(self) -> gl.NVMMADistributedLayout:
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.tile, 16])

    @property
    def mix_layout(self) -> gl.NVMMADistributedLayout:
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.head_dim, 16])


@gluon.constexpr_function
def cut_of(*values: Any) -> Cut:
    """The kernel is given plain numbers, which Triton can write down (see compile_ahead.py)."""
    return Cut(*values)


class Batch(NamedTuple):
    """What all parts of a program know."""

    query_start: Any
    seq_lens: Any
    block_tables: Any
    table_stride: Any
    n_tokens: Any
    n_rows: Any
    n_decode: Any
    n_blocks: Any
    """Blocks of tokens, of which some at the end of a row may not exist."""
    rounds: Any
    """Pieces of work for each program."""
    window: Any
    """In tokens; a large number where there is none."""
    log2_scale: Any
    out: Any
    out_stride: Any


class Ring(NamedTuple):
    stages: Any
    ready: Any
    free: Any


class Shared(NamedTuple):
    """Memory."""

    query_ring: Ring
    key_ring: Ring
    value_ring: Ring
    turns: Any


class Place(NamedTuple):
    """In a ring: a stage, and the parity of how often it has been filled."""

    slot: Any
    parity: Any


class Work(NamedTuple):
    bundle: Any
    row: Any
    token: Any
    """The first."""
    row_end: Any
    seq_len: Any
    begin: Any
    """The first tile."""
    end: Any
    """Behind the last tile; `begin` where there is nothing to do."""


@gluon.jit
def _first_block(row_start, row, n_decode, CUT: gl.constexpr):
    """Leaves every row before it enough blocks, known without knowing their lengths."""
    return (row_start - n_decode) // CUT.block_tokens + row - n_decode


@gluon.jit
def _row_of_block(batch, block, CUT: gl.constexpr):
    """The last row whose blocks begin at or before `block`; n_rows for the padding tokens."""
    low = batch.n_decode
    high = batch.n_rows
    while low < high:
        middle = (low + high + 1) // 2
        start = gl.load(batch.query_start + middle)
        if _first_block(start, middle, batch.n_decode, CUT) <= block:
            low = middle
        else:
            high = middle - 1
    return low


@gluon.jit
def work_of(batch, turn, CUT: gl.constexpr):
    """This program's piece number `turn`. The blocks that see most keys come first, and who has the
    longest of a round has the shortest of the next."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    item = turn * programs + gl.where(turn % 2 == 1, programs - 1 - program, program)
    block = batch.n_blocks - 1 - item // CUT.bundles
    row = _row_of_block(batch, block, CUT)
    row_start = gl.load(batch.query_start + row)
    is_row = row < batch.n_rows
    row_end = gl.load(batch.query_start + row + 1, mask=is_row, other=batch.n_tokens)
    seq_len = gl.load(batch.seq_lens + row, mask=is_row, other=0)
    first_block = _first_block(row_start, row, batch.n_decode, CUT)
    token = row_start + (block - first_block) * CUT.block_tokens
    position = token + seq_len - row_end
    begin = gl.maximum(position - batch.window + 1, 0) // CUT.tile
    keys = gl.minimum(position + CUT.block_tokens, seq_len)
    # Padding sees one tile of nothing.
    end = gl.maximum((keys + CUT.tile - 1) // CUT.tile, begin + 1)
    exists = (block >= 0) & (token < row_end)
    return Work(
        item % CUT.bundles, row, token, row_end, seq_len, begin, gl.where(exists, end, begin)
    )


@gluon.jit
def after(place, STAGES: gl.constexpr):
    last = place.slot + 1 == STAGES
    return Place(gl.where(last, 0, place.slot + 1), gl.where(last, place.parity ^ 1, place.parity))


@gluon.jit
def _load_queries(source, ring, place, work, CUT: gl.constexpr):
    """To each warpgroup its tokens, as rows of (token, head). Those behind a row are loaded and not
    stored again."""
    parts: gl.constexpr = CUT.warpgroups * CUT.panels
    shape: gl.constexpr = [CUT.query_stages * parts, CUT.wg_tokens, CUT.pack, PANEL]
    boxes = ring.stages._reinterpret(source.dtype, shape, source.layout)
    mbarrier.wait(ring.free.index(place.slot), place.parity ^ 1)
    ready = ring.ready.index(place.slot)
    mbarrier.expect(ready, CUT.warpgroups * ROWS * CUT.head_dim * 2)
    for part in gl.static_range(parts):
        token = work.token + part // CUT.panels * CUT.wg_tokens
        at = [token, work.bundle * CUT.pack, part % CUT.panels * PANEL]
        tma.async_copy_global_to_shared(source, at, ready, boxes.index(place.slot * parts + part))


@gluon.jit
def _load_tile(source, ring, place, tile, pages, head, CUT: gl.constexpr):
    """A tile of K or V of a KV head."""
    parts: gl.constexpr = CUT.panels * CUT.boxes
    shape: gl.constexpr = [CUT.stages * parts, 1, CUT.box, PANEL]
    boxes = ring.stages._reinterpret(source.dtype, shape, source.layout)
    mbarrier.wait(ring.free.index(place.slot), place.parity ^ 1)
    ready = ring.ready.index(place.slot)
    mbarrier.expect(ready, CUT.tile * CUT.head_dim * 2)
    # Within what a page holds of all heads.
    row = head * CUT.page + tile * CUT.tile % CUT.page
    for part in gl.static_range(parts):
        at = [pages[part % CUT.boxes], row, part // CUT.boxes * PANEL]
        tma.async_copy_global_to_shared(source, at, ready, boxes.index(place.slot * parts + part))


@gluon.jit
def _pages(table, tile, seq_len, CUT: gl.constexpr):
    """The pages of a tile. Those past the end are outside of the pool: they arrive as zeros."""
    boxes: gl.constexpr = CUT.boxes
    pages = ()
    for box in gl.static_range(boxes):
        key = tile * CUT.tile + box * CUT.box
        page = gl.load(table + key // CUT.page, mask=key < seq_len, other=-1)
        pages = pages + (page,)  # type: ignore[assignment] # noqa: RUF005
    return pages


@gluon.jit
def _load_work(k_source, v_source, shared, place, batch, work, CUT: gl.constexpr):
    """Keys and values in the order in which they are needed: of a tile, the keys come before the
    values of the tile before. Returns where the rings are then."""
    stages: gl.constexpr = CUT.stages
    table = batch.block_tables + work.row.to(gl.int64) * batch.table_stride
    head = work.bundle * CUT.pack // CUT.group
    pages = _pages(table, work.begin, work.seq_len, CUT)
    _load_tile(k_source, shared.key_ring, place, work.begin, pages, head, CUT)
    for tile in range(work.begin + 1, work.end):
        next_pages = _pages(table, tile, work.seq_len, CUT)
        next_place = after(place, stages)
        _load_tile(k_source, shared.key_ring, next_place, tile, next_pages, head, CUT)
        _load_tile(v_source, shared.value_ring, place, tile - 1, pages, head, CUT)
        pages = next_pages
        place = next_place
    _load_tile(v_source, shared.value_ring, place, work.end - 1, pages, head, CUT)
    return after(place, stages)


@gluon.jit
def load(sources, shared, batch, CUT: gl.constexpr):
    """The warp that loads, as far ahead as there are stages."""
    q_source, k_source, v_source = sources
    query_stages: gl.constexpr = CUT.query_stages
    q_place = Place(0, 0)
    place = Place(0, 0)
    for turn in range(batch.rounds):
        work = work_of(batch, turn, CUT)
        if work.begin < work.end:
            _load_queries(q_source, shared.query_ring, q_place, work, CUT)
            q_place = after(q_place, query_stages)
            place = _load_work(k_source, v_source, shared, place, batch, work, CUT)

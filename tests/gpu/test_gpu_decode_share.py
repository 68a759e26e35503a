"""Decode attention of rows that have pages in common: what is computed together, and that it shows
in no bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_layout import Shape, random_batch
from torch import Tensor

from pagemesh.kernels.attention import paged_attention
from pagemesh.kernels.gpu.decode_attention import choose_config, decode_attention
from pagemesh.kernels.gpu.decode_plan import DecodeConfig, DecodePlan, Heads, WorkList, plan_decode
from pagemesh.kernels.gpu.launch import multiprocessors
from pagemesh.kernels.inputs import AttentionInputs

ON_CARD = torch.cuda.is_available()
DEVICE = "cuda" if ON_CARD else "cpu"
SMALL = DecodeConfig(tile_tokens=16, chunk_tokens=32, max_chunks=4)
SHAPE = Shape(n_kv_heads=2, group=4, head_dim=16, block_tokens=16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


class Copy(NamedTuple):
    """`row` has the pages `first` to `stop` of `source`."""

    row: int
    source: int
    first: int
    stop: int


@dataclass(frozen=True)
class Step:
    """Decode rows over a pool that is full of numbers: any table will do."""

    shape: Shape
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    inputs: AttentionInputs

    @classmethod
    def of(cls, lengths: list[int], copies: list[Copy], shape: Shape, dtype: torch.dtype) -> Step:
        rows = [(1, length) for length in lengths]
        batch = random_batch(shape, rows, n_decode=len(rows), seed=0, dtype=dtype)
        tables = batch.inputs.block_tables
        for row, source, first, stop in copies:
            tables[row, first:stop] = tables[source, first:stop]
        generator = torch.Generator(DEVICE).manual_seed(1)
        k_cache, v_cache = (
            torch.randn(batch.k_cache.shape, generator=generator, device=DEVICE).to(dtype)
            for _ in range(2)
        )
        tensors = {
            name: getattr(batch.inputs, name).to(DEVICE)
            for name in ("query_start", "seq_lens", "block_tables", "slot_mapping")
        }
        inputs = replace(batch.inputs, **tensors)
        return cls(shape, batch.q.to(DEVICE), k_cache, v_cache, inputs)

    @property
    def heads(self) -> Heads:
        return Heads(self.shape.n_kv_heads, self.shape.group, self.shape.head_dim)

    def attend(self, config: DecodeConfig) -> Tensor:
        out = torch.full_like(self.q, torch.nan)
        caches = self.k_cache, self.v_cache
        scale = self.shape.scale
        decode_attention(self.q, *caches, self.inputs, scale=scale, out=out, config=config)
        assert not self.plan(config).arrived.any()
        return out

    def plan(self, config: DecodeConfig, window: int | None = None) -> DecodePlan:
        return plan_decode(self.inputs, self.heads, self.shape.block_tokens, window, config)

    def error(self, result: Tensor) -> float:
        caches = self.k_cache, self.v_cache
        expected = paged_attention(self.q, *caches, self.inputs, scale=self.shape.scale)
        return float((result - expected).double().norm() / (expected.double().norm() + 1e-30))


class Item(NamedTuple):
    rows: tuple[int, ...]
    start: int
    stop: int
    chunk: int


def items_of(plan: DecodePlan) -> tuple[list[Item], list[Item]]:
    """Chunks that are not the last of their rows, and those that are."""
    singles, shared = (read(work) for work in (plan.singles, plan.shared))
    n_rows = len(plan.n_chunks)
    return singles[n_rows:] + shared, singles[:n_rows]


def read(work: WorkList) -> list[Item]:
    items = work.items[: int(work.n_items)].tolist()
    return [Item(tuple(rows[:n]), *item) for *item, n, rows in map(unpacked, items)]


def unpacked(fields: list[int]) -> tuple[int, int, int, int, list[int]]:
    start, stop, which, *rows = fields
    chunk = which & 0xFFFF
    return start, stop, -1 if chunk == 0xFFFF else chunk, which >> 16, rows


def chunk_size(tokens: int, config: DecodeConfig) -> int:
    size = config.chunk_tokens
    while size * config.max_chunks < tokens:
        size *= 2
    return size


def cuts(tokens: int, config: DecodeConfig) -> list[int]:
    """The bounds of the chunks of a row that sees so many tokens, from its first."""
    size = chunk_size(tokens, config)
    inner = range(size, tokens, size) if 2 * tokens > 3 * size else ()
    return [0, *inner, tokens]


def expected_items(step: Step, config: DecodeConfig) -> set[Item]:
    """Of the chunks that are not the last of their rows."""
    lengths, tables = step.inputs.seq_lens.tolist(), step.inputs.block_tables.tolist()
    bounds = [cuts(length, config) for length in lengths]
    total = sum(len(ends) - 1 for ends in bounds)
    most = total // -(-config.programs // step.shape.n_kv_heads)
    most = min(config.max_members(step.shape.group), max(1, most))
    firsts: dict[tuple[int, ...], list[int]] = {}
    classes: dict[tuple[int, ...], list[int]] = {}
    for row, ends in enumerate(bounds):
        for chunk, (start, stop) in enumerate(pairwise(ends[:-1])):
            block = step.shape.block_tokens
            pages = tables[row][start // block : (stop - 1) // block + 1]
            same = firsts.setdefault((chunk, start, stop, pages[-1]), pages) == pages
            name = (chunk, start, stop, pages[-1], -1 if same else row)
            classes.setdefault(name, []).append(row)
    return {
        Item(tuple(rows[first : first + most]), start, stop, chunk)
        for (chunk, start, stop, _, _), rows in classes.items()
        for first in range(0, len(rows), most)
    }


def check_plan(step: Step, config: DecodeConfig) -> None:
    """Also that every chunk of every row is there once, and that a row's follow each other."""
    inner, last = items_of(step.plan(config))
    assert set(inner) == expected_items(step, config)
    assert [item.rows for item in last] == [(row,) for row in range(len(last))]
    for row, length in enumerate(step.inputs.seq_lens.tolist()):
        mine = sorted((item.chunk, item.start, item.stop) for item in inner if row in item.rows)
        _, start, stop, chunk = last[row]
        ends = cuts(length, config)
        assert [*mine, (max(chunk, 0), start, stop)] == [
            (number, *bounds) for number, bounds in enumerate(pairwise(ends))
        ]
        assert (chunk < 0) == (len(ends) == 2)
        assert len(ends) - 1 <= config.chunks(length)


class Drawn(NamedTuple):
    lengths: list[int]
    copies: list[Copy]
    shape: Shape
    config: DecodeConfig


@st.composite
def steps(draw: st.DrawFn) -> Drawn:
    shape = Shape(
        n_kv_heads=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 2, 3, 4, 8])),
        head_dim=16,
        block_tokens=draw(st.sampled_from([16, 32, 64, 128])),
    )
    config = replace(
        SMALL,
        programs_per_sm=draw(st.sampled_from([1, 4])),
    )
    lengths = draw(st.lists(st.integers(0, 160), min_size=1, max_size=4))
    common = draw(st.integers(0, 6)) * [draw(st.integers(60, 160))]
    lengths = draw(st.permutations(lengths + common))
    row, page = st.integers(0, len(lengths) - 1), st.integers(0, 160 // shape.block_tokens + 1)
    copy = st.tuples(row, row, page | st.just(0), page)
    copies = [
        Copy(row, source, min(ends), max(ends))
        for row, source, *ends in draw(st.lists(copy, max_size=4))
    ]
    if draw(st.booleans()):
        copies += [Copy(row, 0, 0, draw(page)) for row in range(1, len(lengths))]
    return Drawn(lengths, copies, shape, config)


@settings(max_examples=8, deadline=None)
@given(steps())
def test_any_sharing(drawn):
    *layout, config = drawn
    step = Step.of(*layout, torch.float32)
    check_plan(step, config)
    result = step.attend(config)
    assert step.error(result) < TOLERANCE[torch.float32]
    assert torch.equal(result, step.attend(replace(config, share=False)))


def in_common(n_rows: int, n_pages: int) -> list[Copy]:
    return [Copy(row, 0, 0, n_pages) for row in range(1, n_rows)]


def test_rows_need_not_be_neighbours():
    """Every third row has the same prefix; more rows than one planning program has."""
    copies = [Copy(row, row % 3, 0, 4) for row in range(40)]
    step = Step.of([100] * 40, copies, SHAPE, torch.float32)
    check_plan(step, SMALL)
    inner, _ = items_of(step.plan(SMALL))
    if not ON_CARD:  # which has so little work that none is shared
        assert len(inner) == 2 * (4 + 4 + 4) + 40
        assert (0, 3, 6, 9) in {item.rows for item in inner}


def test_an_earlier_page_that_differs():
    """Rows 1 and 2 have row 0's second page of a chunk, row 1 its first one too."""
    copies = [Copy(1, 0, 0, 2), Copy(2, 0, 1, 2)]
    step = Step.of([60] * 3, copies, SHAPE, torch.float32)
    config = replace(SMALL, programs_per_sm=1)
    check_plan(step, config)


def test_without_enough_work_each_row_is_computed_by_itself():
    """Sixteen chunks, and so many programs."""
    step = Step.of([60] * 8, in_common(8, 4), SHAPE, torch.float32)
    config = replace(SMALL, programs_per_sm=8 * 2 * SHAPE.n_kv_heads)
    check_plan(step, config)
    inner, _ = items_of(step.plan(config))
    assert all(len(item.rows) == 1 for item in inner)


def test_rows_of_one_chunk_are_never_looked_at_together():
    plans = [Step.of([n], [], SHAPE, torch.float32).plan(SMALL) for n in (5, 100)]
    assert [plan.max_chunks for plan in plans] == [1, 4]
    assert [plan.shared.members for plan in plans] == [1, 4]


@pytest.mark.parametrize("window", [None, 50])
def test_the_chunks_of_a_row_cover_what_it_sees(window):
    """More rows than are compared at a time."""
    lengths = [(37 * row) % 250 for row in range(150)]
    step = Step.of(lengths, [], replace(SHAPE, n_kv_heads=1, head_dim=2), torch.float32)
    inner, last = items_of(step.plan(SMALL, window))
    assert all(len(item.rows) == 1 for item in inner)
    for row, length in enumerate(lengths):
        seen = length if window is None else min(length, window)
        mine = sorted(item[1:3] for item in [*inner, last[row]] if item.rows == (row,))
        ends = [length - seen + end for end in cuts(seen, SMALL)]
        assert mine == list(pairwise(ends))


@pytest.mark.parametrize("tokens", [0, 1, 48, 49, 64, 65, 128, 129, 5000])
def test_the_host_knows_a_bound_of_chunks(tokens):
    assert len(cuts(tokens, SMALL)) - 1 <= SMALL.chunks(tokens)
    assert max(len(cuts(n, SMALL)) - 1 for n in range(tokens)[-200:] or [0]) <= SMALL.chunks(tokens)


@pytest.mark.parametrize("group", [1, 3, 4])
def test_sharing_shows_in_no_bit(dtype, group):
    """Also in rows that differ in length and have only some chunks in common."""
    lengths = [100 + 3 * row for row in range(9)]
    copies = in_common(9, 2)[::2] + in_common(9, 6)[1::2]
    step = Step.of(lengths, copies, replace(SHAPE, n_kv_heads=1, group=group), dtype)
    config = replace(SMALL, programs_per_sm=1, max_chunks=8)
    together = step.attend(config)
    alone = step.attend(replace(config, share=False))
    assert torch.equal(together, alone)
    assert step.error(together) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(8, 4, 128), (8, 2, 128), (4, 3, 64), (8, 8, 128)], ids=str)
def test_the_tuned_configuration_shows_sharing_in_no_bit(dtype, heads):
    """Rows by the hundreds, so that several are computed together; many programs race."""
    n_rows = 200
    lengths = [2048 + 61 * row % 700 for row in range(n_rows)]
    copies = in_common(100, 128) + [Copy(row, 100, 0, 90) for row in range(101, n_rows)]
    step = Step.of(lengths, copies, Shape(*heads, block_tokens=16), dtype)
    config = choose_config(step.heads, dtype, multiprocessors())
    inner, _ = items_of(step.plan(config))
    assert max(len(item.rows) for item in inner) == config.max_members(step.heads.group)
    alone = step.attend(replace(config, share=False))
    assert all(torch.equal(step.attend(config), alone) for _ in range(20))
    assert step.error(alone) < TOLERANCE[dtype]

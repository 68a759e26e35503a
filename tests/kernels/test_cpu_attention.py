"""The CPU's paged attention against dense attention, and its promise of equal bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cpu_programs import compute, dims, no_rows, one_op, weights_of
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_layout import Batch, Shape, dense_attention, random_batch

from pagemesh.kernels.cpu import program
from pagemesh.kernels.cpu.attention import TILE_KEYS, query_tokens
from pagemesh.worker_svc.models.packing import as_bits

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SHAPES = st.builds(
    Shape,
    n_kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 8, 49]),
    head_dim=st.sampled_from([2, 8, 24, 64, 80, 96]),
    block_tokens=st.sampled_from([1, 5, 16, 24, 128]),
)
CONTEXTS = st.one_of(
    st.integers(0, 40),
    st.integers(TILE_KEYS - 2, TILE_KEYS + 2),
    st.integers(2 * TILE_KEYS - 2, 2 * TILE_KEYS + 30),
)
ROWS = st.lists(
    st.tuples(st.one_of(st.just(1), st.integers(1, 60)), CONTEXTS).map(
        lambda row: (row[0], row[1] + row[0])
    ),
    max_size=4,
)
WINDOWS = st.one_of(st.none(), st.integers(1, 2 * TILE_KEYS))
SEEDS = st.integers(0, 2**31)


def pieces_of(batch: Batch, seed: int) -> np.ndarray:
    """The batch's work, cut at random."""
    rng = np.random.default_rng(seed)
    most = query_tokens(batch.shape.group)
    starts, lengths = batch.inputs.query_start.tolist(), batch.inputs.seq_lens.tolist()
    pieces = []
    for row, length in enumerate(lengths):
        token, end = starts[row], starts[row + 1]
        while token < end and length:
            count = int(rng.integers(1, min(most, end - token) + 1))
            pieces.append((row, token, length - (end - token), count))
            token += count
    return np.array(pieces, np.int64).reshape(-1, 4)


def attention(batch: Batch, work: np.ndarray, window: int | None, n_threads: int = 1):
    """[T, Hq, D] of the kernel; `UNTOUCHED` where nothing was written."""
    shape = batch.shape
    n_heads = shape.n_kv_heads * shape.group
    # Layer 0 is another layer's.
    pool = torch.full((2, 2, *batch.k_cache.shape), torch.nan, dtype=batch.k_cache.dtype)
    pool[1, 0] = batch.k_cache.transpose(2, 3).contiguous().view_as(batch.k_cache)
    pool[1, 1] = batch.v_cache
    width = n_heads * shape.head_dim
    stride = width + 2 * shape.n_kv_heads * shape.head_dim + 7
    tokens = len(batch.q)
    buffers = torch.full((tokens * (stride + width),), torch.nan)
    x = buffers[: tokens * stride].view(tokens, stride)
    x[:, :width] = batch.q.flatten(1)
    out = buffers[tokens * stride :].view(tokens, n_heads, shape.head_dim)
    op = one_op(program.ATTEND, layer=1, x_stride=stride, out=tokens * stride, out_stride=width,
                window=window or 0)  # fmt: skip
    compute(
        op,
        buffers,
        tokens,
        shape=dims(n_heads=n_heads, n_kv_heads=shape.n_kv_heads, head_dim=shape.head_dim),
        weights=weights_of(as_bits(torch.empty(0, dtype=pool.dtype))),
        pool=pool,
        num_blocks=len(batch.k_cache),
        block_tokens=shape.block_tokens,
        rows=no_rows()._replace(tables=batch.inputs.block_tables.numpy(), work=work),
        n_threads=n_threads,
    )
    return out


@settings(max_examples=50)
@given(SHAPES, ROWS, WINDOWS, DTYPES, SEEDS, st.integers(0, 2), st.integers(1, 3))
def test_equals_dense_attention(shape, rows, window, dtype, seed, padding_tokens, n_threads):
    """Over pages of NaN wherever no sequence has stored anything."""
    batch = random_batch(shape, [*rows, (1, 0)], n_decode=0, seed=seed,
                         padding_tokens=padding_tokens, dtype=dtype)  # fmt: skip
    out = attention(batch, pieces_of(batch, seed), window, n_threads)
    real = len(out) - 1 - padding_tokens
    expected = dense_attention(batch, window)
    torch.testing.assert_close(out[:real].double(), expected[:real], atol=1e-5, rtol=1e-5)
    assert out[real:].isnan().all(), "a padding row has no work"


@settings(max_examples=40)
@given(SHAPES, ROWS, WINDOWS, DTYPES, SEEDS)
def test_bits_do_not_depend_on_how_the_work_is_cut(shape, rows, window, dtype, seed):
    batch = random_batch(shape, rows, n_decode=0, seed=seed, dtype=dtype)
    one, other = (attention(batch, pieces_of(batch, seed + i), window, 1 + 2 * i) for i in (0, 1))
    assert torch.equal(one, other)


@settings(max_examples=40)
@given(SHAPES, ROWS, WINDOWS, DTYPES, SEEDS, st.sampled_from([1, 5, 16, 24, 128]))
def test_bits_do_not_depend_on_the_pages(shape, rows, window, dtype, seed, block_tokens):
    outs = []
    for layout in (shape, replace(shape, block_tokens=block_tokens)):
        batch = random_batch(layout, rows, n_decode=0, seed=seed, dtype=dtype)
        outs.append(attention(batch, pieces_of(batch, seed), window))
    assert torch.equal(*outs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("block_tokens", [16, 32, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_pages_read_in_place_give_the_bits_of_copied_ones(head_dim, block_tokens, window, dtype):
    """Single tokens read whole pages where they lie, chunks and odd pages are copied."""
    rows = [(30, length) for length in (30, 63, 64, 65, 81, 150)]
    shape = Shape(n_kv_heads=2, group=3, head_dim=head_dim, block_tokens=block_tokens)
    batch = random_batch(shape, rows, n_decode=0, seed=1, dtype=dtype)
    work = pieces_of(batch, 0)
    singles = np.array(
        [(row, token + i, first + i, 1) for row, token, first, n in work for i in range(n)]
    )
    odd = random_batch(replace(shape, block_tokens=5), rows, n_decode=0, seed=1, dtype=dtype)
    expected = attention(odd, work, window)
    for layout, pieces in ((batch, singles), (batch, work), (odd, singles)):
        assert torch.equal(attention(layout, pieces, window), expected)


@pytest.mark.parametrize("group", [1, 3])
def test_nan_of_one_sequence_reaches_no_other(group):
    shape = Shape(n_kv_heads=2, group=group, head_dim=24, block_tokens=5)
    batch = random_batch(shape, [(1, 70), (3, 33), (1, 9), (20, 90)], n_decode=0, seed=3)
    work = pieces_of(batch, 0)
    clean = attention(batch, work, None)
    for token in (1, 2, 3):
        batch.q[token] = torch.nan
    blocks = batch.inputs.block_tables[2, :2].long()
    batch.k_cache[blocks], batch.v_cache[blocks] = torch.nan, torch.nan
    out = attention(batch, work, None)
    assert out[1:5].isnan().all()
    others = [0, *range(5, 25)]
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_query_without_a_finite_score_is_told_by_nan(bad):
    shape = Shape(n_kv_heads=1, group=1, head_dim=8, block_tokens=16)
    batch = random_batch(shape, [(1, 1), (1, 100)], n_decode=2, seed=0)
    batch.q[:] = bad
    assert attention(batch, pieces_of(batch, 0), None).isnan().all()


def test_very_large_scores_do_not_overflow():
    shape = Shape(n_kv_heads=1, group=2, head_dim=8, block_tokens=16)
    batch = random_batch(shape, [(1, 200), (40, 130)], n_decode=1, seed=0)
    batch.q.mul_(1e4)
    out = attention(batch, pieces_of(batch, 0), None)
    torch.testing.assert_close(out.double(), dense_attention(batch, None), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_value_spoils_only_the_tokens_that_see_it(bad, window):
    """Tokens before it, and those whose window has left it, keep their bits."""
    shape = Shape(n_kv_heads=1, group=2, head_dim=64, block_tokens=16)
    batch = random_batch(shape, [(150, 150)], n_decode=0, seed=5)
    work = pieces_of(batch, 0)
    clean = attention(batch, work, window)
    position = 70
    block = int(batch.inputs.block_tables[0, position // 16])
    batch.v_cache[block, :, position % 16] = bad
    out = attention(batch, work, window)
    end = 150 if window is None else position + window
    assert torch.equal(out[:position], clean[:position])
    assert not out[position:end].isfinite().any()
    assert torch.equal(out[end:], clean[end:])
    singles = np.array([(0, token, token, 1) for token in range(150)])
    torch.testing.assert_close(attention(batch, singles, window), out, equal_nan=True)

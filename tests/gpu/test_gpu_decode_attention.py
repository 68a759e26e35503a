"""Decode attention: against dense attention and the reference, over random paged layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged_layout import Batch, Shape, counted, dense_attention, random_batch
from torch import Tensor

from pagemesh.kernels.attention import paged_attention
from pagemesh.kernels.gpu.decode_attention import decode_attention
from pagemesh.kernels.gpu.decode_plan import DecodeConfig

ON_CARD = torch.cuda.is_available()
# Small tiles and chunks: several of both, and a row that wants more chunks than there may be.
SMALL = DecodeConfig(tile_tokens=16, chunk_tokens=32, max_chunks=3)
SHAPE = Shape(n_kv_heads=2, group=2, head_dim=64, block_tokens=16)
LENGTHS = [1, 16, 0, 130, 47, 33]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
HEAD_DIMS = [64, 80, 96, 128, 256] if ON_CARD else [80, 128]
GROUPS = [1, 2, 3, 4, 7, 8] if ON_CARD else [1, 7]
BLOCK_TOKENS = [16, 32, 64, 128] if ON_CARD else [32]


def on(device: str, batch: Batch) -> Batch:
    names = ["query_start", "seq_lens", "block_tables", "slot_mapping"]
    names += ["counts"] if batch.inputs.counts is not None else []
    tensors = {name: getattr(batch.inputs, name).to(device) for name in names}
    return replace(
        batch,
        q=batch.q.to(device),
        k_cache=batch.k_cache.to(device),
        v_cache=batch.v_cache.to(device),
        inputs=replace(batch.inputs, **tensors),
    )


def decode_batch(
    lengths: list[int],
    device: str,
    dtype: torch.dtype = torch.float32,
    *,
    shape: Shape = SHAPE,
    seed: int = 0,
) -> Batch:
    rows = [(1, length) for length in lengths]
    return on(device, random_batch(shape, rows, n_decode=len(rows), seed=seed, dtype=dtype))


def attend(batch: Batch, window: int | None = None, config: DecodeConfig | None = SMALL) -> Tensor:
    out = torch.full_like(batch.q, torch.nan)
    scale = batch.shape.scale
    caches = batch.k_cache, batch.v_cache
    result = decode_attention(
        batch.q, *caches, batch.inputs, scale=scale, window=window, out=out, config=config
    )
    assert result is out
    return out


def assert_close(batch: Batch, window: int | None, config: DecodeConfig | None = SMALL) -> None:
    expected = dense_attention(replace(batch, q=batch.q.cpu()), window)
    error = (attend(batch, window, config).cpu().double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[batch.q.dtype]


@pytest.mark.parametrize("window", [None, 1, 20, 70])
def test_ragged_lengths(device, dtype, window):
    assert_close(decode_batch(LENGTHS, device, dtype), window)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(device, dtype, head_dim):
    shape = Shape(n_kv_heads=1, group=2, head_dim=head_dim, block_tokens=16)
    assert_close(decode_batch([70, 5], device, dtype, shape=shape), None)


@pytest.mark.parametrize("group", GROUPS)
def test_groups(device, dtype, group):
    shape = Shape(n_kv_heads=3, group=group, head_dim=64, block_tokens=16)
    assert_close(decode_batch([70, 5], device, dtype, shape=shape), None)


@pytest.mark.parametrize("block_tokens", BLOCK_TOKENS)
def test_page_sizes(device, dtype, block_tokens):
    """Also windows that start inside a page, and pages larger than a tile."""
    shape = replace(SHAPE, block_tokens=block_tokens)
    lengths = [block_tokens - 1, block_tokens, block_tokens + 1, 3 * block_tokens]
    batch = decode_batch(lengths, device, dtype, shape=shape)
    assert_close(batch, None)
    assert_close(batch, 37)


def test_the_tuned_configuration_equals_the_reference(device, dtype):
    lengths = [1, 130, 2000, 700, 9000] if ON_CARD else [1, 130]
    batch = decode_batch(lengths, device, dtype)
    caches = batch.k_cache, batch.v_cache
    expected = paged_attention(batch.q, *caches, batch.inputs, scale=SHAPE.scale).double()
    error = (attend(batch, config=None).double() - expected).norm() / expected.norm()
    assert error < 2 * TOLERANCE[dtype]


def test_a_row_is_the_same_alone_and_in_a_batch(device, dtype):
    batch = decode_batch(LENGTHS, device, dtype)
    together = attend(batch)
    for row, length in enumerate(LENGTHS):
        inputs = replace(
            batch.inputs,
            query_start=batch.inputs.query_start[:2],
            seq_lens=batch.inputs.seq_lens[row : row + 1],
            block_tables=batch.inputs.block_tables[row : row + 1],
            max_seq_tokens=length,
            n_decode=1,
        )
        alone = attend(replace(batch, q=batch.q[row : row + 1], inputs=inputs))
        assert torch.equal(alone[0], together[row])


def test_layers_share_a_plan(device, dtype):
    """What one layer counts is zero again for the next."""
    batch = decode_batch(LENGTHS, device, dtype)
    first = attend(batch)
    other = replace(batch, q=-batch.q)
    assert not torch.equal(attend(other), first)
    assert torch.equal(attend(batch), first)
    assert len(batch.inputs.plans) == 1


def test_query_and_result_may_be_views(device, dtype):
    batch = decode_batch(LENGTHS, device, dtype)
    expected = attend(batch)
    packed = torch.cat([batch.q, torch.full_like(batch.q, torch.nan)], dim=1)
    out = torch.full_like(packed, 7)
    n_heads = batch.q.shape[1]
    decode_attention(
        packed[:, :n_heads],
        batch.k_cache,
        batch.v_cache,
        batch.inputs,
        scale=SHAPE.scale,
        out=out[:, :n_heads],
        config=SMALL,
    )
    assert torch.equal(out[:, :n_heads], expected)
    assert (out[:, n_heads:] == 7).all()


def test_no_rows_launch_nothing(device):
    batch = decode_batch([], device)
    assert attend(batch).shape == (0, 4, SHAPE.head_dim)
    assert not batch.inputs.plans


def test_only_the_leading_rows_are_decoded(device, dtype):
    """A mixed step: rows of more tokens follow."""
    rows = [(1, 40), (1, 3), (5, 30)]
    batch = on(device, random_batch(SHAPE, rows, n_decode=2, seed=1, dtype=dtype))
    expected = dense_attention(replace(batch, q=batch.q.cpu()), None)[:2]
    error = attend(replace(batch, q=batch.q[:2])).cpu().double() - expected
    assert error.norm() / expected.norm() < TOLERANCE[dtype]


def test_rows_that_only_the_device_counts(device, dtype):
    """Behind them are rows with prompt tokens, which stay as they are."""
    rows = [(1, 40), (1, 130), (5, 130), (3, 64)]
    batch = random_batch(SHAPE, rows, n_decode=2, seed=1, dtype=dtype)
    expected = attend(on(device, replace(batch, q=batch.q[:2])))
    more = counted(batch)
    n_most = more.inputs.n_decode
    assert n_most > 2
    out = attend(on(device, replace(more, q=more.q[:n_most])))
    assert torch.equal(out[:2], expected)
    assert out[2:].isnan().all()


def test_counted_rows_share_as_others_do(device, dtype):
    """Nine rows with common pages, of as many as there may be twelve."""
    rows = [(1, 100 + 3 * row) for row in range(9)]
    batch = random_batch(SHAPE, rows, n_decode=9, seed=1, dtype=dtype, padding_tokens=4)
    batch.inputs.block_tables[1:, :6] = batch.inputs.block_tables[0, :6].clone()
    config = replace(SMALL, programs_per_sm=1, max_chunks=8)
    expected = attend(on(device, replace(batch, q=batch.q[:9])), config=config)
    more = counted(batch)
    assert more.inputs.n_decode > 9
    there = on(device, replace(more, q=more.q[: more.inputs.n_decode]))
    assert torch.equal(attend(there, config=config)[:9], expected)
    if device == "cpu":  # a card has too many programs for so few rows to share
        [plan] = there.inputs.plans.values()
        assert int(plan.shared.n_items) > 0


@pytest.mark.gpu
def test_captured_with_lengths_that_change(device, dtype):
    """One graph of plan and two layers follows the lengths on the device."""
    config = DecodeConfig(chunk_tokens=128, max_chunks=4)
    most = [900] * 40
    captured = decode_batch(most, device, dtype)
    attend(decode_batch(most, device, dtype), config=config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [attend(captured, config=config) for _ in range(2)]
    for seed in range(4):
        lengths = torch.randint(0, 901, (40,), generator=torch.Generator().manual_seed(seed))
        captured.inputs.seq_lens.copy_(lengths)
        graph.replay()
        fresh = replace(captured.inputs, seq_lens=lengths.to(device, torch.int32))
        expected = attend(replace(captured, inputs=fresh), config=config)
        assert all(torch.equal(out, expected) for out in outs)


@pytest.mark.gpu
def test_many_programs_race_to_the_same_bits(device, dtype):
    config = DecodeConfig(tile_tokens=32, chunk_tokens=64, max_chunks=32)
    batch = decode_batch([2000, 1999, 1000, 0, 70] * 8, device, dtype)
    first = attend(batch, config=config)
    assert all(torch.equal(attend(batch, config=config), first) for _ in range(50))
    assert_close(batch, None, config)

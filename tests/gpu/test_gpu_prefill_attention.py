"""Prefill attention over pages, against the definition and the torch reference."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise

import pytest
import torch
from paged_layout import Batch, Shape, counted, dense_attention, random_batch

from pagemesh.kernels.attention import paged_attention
from pagemesh.kernels.gpu.prefill_attention import PrefillConfig, choose_config, prefill_attention

ON_CARD = torch.cuda.is_available()
# Few tokens a block and a tile, so that short sequences have many of both.
SMALL = PrefillConfig(block_rows=32, tile_tokens=16, num_warps=4, num_stages=1)
RAGGED = [(1, 1), (9, 9), (3, 40), (0, 0), (17, 64), (33, 33), (1, 31)]
POISON = 1e4


def on(device: str, batch: Batch) -> Batch:
    inputs = batch.inputs
    moved = {
        f.name: getattr(inputs, f.name).to(device)
        for f in fields(inputs)
        if isinstance(getattr(inputs, f.name), torch.Tensor)
    }
    q, k_cache, v_cache = (x.to(device) for x in (batch.q, batch.k_cache, batch.v_cache))
    return replace(batch, q=q, k_cache=k_cache, v_cache=v_cache, inputs=replace(inputs, **moved))


def run(batch: Batch, device: str, *, window: int | None = None, config=None) -> torch.Tensor:
    """On the host again; what the kernel did not write is POISON."""
    there = on(device, batch)
    out = torch.full_like(there.q, POISON)
    prefill_attention(
        there.q,
        there.k_cache,
        there.v_cache,
        there.inputs,
        scale=batch.shape.scale,
        window=window,
        out=out,
        config=config,
    )
    return out.cpu()


def check(batch: Batch, device: str, *, window: int | None = None, config=None) -> None:
    out = run(batch, device, window=window, config=config)
    tolerance = 2e-5 if batch.q.dtype is torch.float32 else 3e-2
    n_decode = batch.inputs.n_decode
    assert (out[:n_decode] == POISON).all()
    torch.testing.assert_close(
        out[n_decode:].double(),
        dense_attention(batch, window)[n_decode:],
        atol=tolerance,
        rtol=tolerance,
    )


@pytest.mark.parametrize("block_tokens", [16, 32, 128] if ON_CARD else [16, 32])
@pytest.mark.parametrize("window", [None, 1, 16, 23, 1000] if ON_CARD else [None, 1, 23])
def test_equals_dense_attention(device, dtype, block_tokens, window):
    """Tiles smaller than a page, as large, and larger (on a card: the tuned ones)."""
    shape = Shape(n_kv_heads=2, group=2, head_dim=64, block_tokens=block_tokens)
    batch = random_batch(shape, RAGGED, n_decode=0, seed=1, padding_tokens=2, dtype=dtype)
    check(batch, device, window=window, config=None if ON_CARD else SMALL)


@pytest.mark.parametrize("group", range(1, 9) if ON_CARD else [1, 3, 8])
def test_query_heads_that_share_a_kv_head(device, dtype, group):
    shape = Shape(n_kv_heads=2, group=group, head_dim=64, block_tokens=16)
    check(random_batch(shape, [(20, 35), (5, 5)], n_decode=0, seed=2, dtype=dtype), device)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(device, dtype, head_dim):
    shape = Shape(n_kv_heads=1, group=2, head_dim=head_dim, block_tokens=16)
    check(random_batch(shape, [(18, 37)], n_decode=0, seed=3, dtype=dtype), device)


def test_rows_behind_decode_rows(device, dtype):
    """Padding among them, too; the decode rows' part is not touched."""
    shape = Shape(n_kv_heads=1, group=2, head_dim=64, block_tokens=16)
    rows = [(1, 30), (1, 0), (1, 7), (4, 4), (19, 50), (3, 0), (2, 20)]
    batch = random_batch(shape, rows, n_decode=3, seed=4, padding_tokens=40, dtype=dtype)
    check(batch, device, config=None if ON_CARD else SMALL)


def test_counts_that_only_the_device_knows(device, dtype):
    shape = Shape(n_kv_heads=1, group=2, head_dim=64, block_tokens=16)
    rows = [(1, 30), (1, 0), (4, 4), (19, 50), (0, 0), (2, 20)]
    batch = random_batch(shape, rows, n_decode=2, seed=8, padding_tokens=40, dtype=dtype)
    config = None if ON_CARD else SMALL
    assert torch.equal(
        run(counted(batch), device, config=config), run(batch, device, config=config)
    )


def test_only_padding_behind_decode_rows(device, dtype):
    shape = Shape(n_kv_heads=1, group=1, head_dim=64, block_tokens=16)
    rows = [(1, 3), (1, 5)]
    check(
        random_batch(shape, rows, n_decode=2, seed=5, padding_tokens=3, dtype=dtype),
        device,
    )


@pytest.mark.parametrize("window", [None, 20])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(device, dtype, window):
    shape = Shape(n_kv_heads=2, group=2, head_dim=64, block_tokens=16)
    rows = [(5, 21), (40, 66), (30, 30)]
    batch = random_batch(shape, rows, n_decode=0, seed=6, dtype=dtype)
    whole = run(batch, device, window=window)
    for row in range(len(rows)):
        alone = chunk_of(batch, row, 0, rows[row][0])
        tokens = slice(*batch.inputs.query_start[row : row + 2].tolist())
        assert torch.equal(run(alone, device, window=window), whole[tokens])


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("cuts", [[16, 48], [1, 2, 33, 90], [63]])
def test_a_chunked_prompt_has_the_same_bits(device, dtype, window, cuts):
    shape = Shape(n_kv_heads=1, group=2, head_dim=64, block_tokens=16)
    n_tokens = 1000 if ON_CARD else 100
    batch = random_batch(shape, [(n_tokens, n_tokens)], n_decode=0, seed=7, dtype=dtype)
    whole = run(batch, device, window=window)
    bounds = [0, *cuts, n_tokens]
    chunks = [
        run(chunk_of(batch, 0, first, stop), device, window=window)
        for first, stop in pairwise(bounds)
    ]
    assert torch.equal(torch.cat(chunks), whole)


def chunk_of(batch: Batch, row: int, first: int, stop: int) -> Batch:
    """Query tokens `first` to `stop` of a row, alone in a batch; what comes after is not there."""
    start, end = batch.inputs.query_start[row : row + 2].tolist()
    length = int(batch.inputs.seq_lens[row]) - (end - start) + stop
    n = stop - first
    inputs = replace(
        batch.inputs,
        query_start=torch.tensor([0, n], dtype=torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        block_tables=batch.inputs.block_tables[row : row + 1].clone(),
        slot_mapping=batch.inputs.slot_mapping[start + first : start + stop],
        max_query_tokens=n,
        max_seq_tokens=length,
        n_decode=0,
    )
    return replace(batch, q=batch.q[start + first : start + stop].contiguous(), inputs=inputs)


def test_later_values_that_are_not_numbers_spoil_no_earlier_chunk(device, dtype):
    """What lies behind a chunk in its own last page is another's until it is written."""
    shape = Shape(n_kv_heads=1, group=1, head_dim=64, block_tokens=16)
    batch = random_batch(shape, [(40, 40)], n_decode=0, seed=8, dtype=dtype)
    first = run(batch, device)[:20]
    table = batch.inputs.block_tables[0]
    for cache in (batch.k_cache, batch.v_cache):
        cache[table[1], :, 4:] = torch.nan
        cache[table[2]] = torch.nan
    assert torch.equal(run(chunk_of(batch, 0, 0, 20), device), first)


def test_q_may_be_part_of_a_wider_tensor(device, dtype):
    shape = Shape(n_kv_heads=1, group=2, head_dim=64, block_tokens=16)
    batch = random_batch(shape, [(20, 20)], n_decode=0, seed=9, dtype=dtype)
    wide = torch.cat([batch.q, torch.full_like(batch.q, torch.nan)], dim=1)
    there = on(device, batch)
    out = torch.empty_like(there.q)
    prefill_attention(
        wide.to(device)[:, : batch.q.shape[1]],
        there.k_cache,
        there.v_cache,
        there.inputs,
        scale=shape.scale,
        out=out,
    )
    assert torch.equal(out.cpu(), run(batch, device))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [None, 300])
def test_bits_do_not_depend_on_the_size_of_blocks(device, head_dim, window):
    """So short chunks may take small blocks."""
    shape = Shape(n_kv_heads=2, group=4, head_dim=head_dim, block_tokens=16)
    batch = random_batch(shape, [(700, 900)], n_decode=0, seed=10, dtype=torch.bfloat16)
    large, small = (choose_config(torch.bfloat16, head_dim, rows) for rows in (1024, 1))
    assert large.block_rows != small.block_rows
    outs = [run(batch, device, window=window, config=config) for config in (large, small)]
    assert torch.equal(*outs)


@pytest.mark.gpu
@pytest.mark.parametrize("block_tokens", [16, 64, 128])
@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_equals_the_reference_at_real_sizes(device, dtype, block_tokens, window, head_dim):
    shape = Shape(n_kv_heads=2, group=4, head_dim=head_dim, block_tokens=block_tokens)
    rows = [(1, 700), (1, 3), (2048, 5000), (130, 130), (1000, 1001), (1, 4000)]
    batch = random_batch(shape, rows, n_decode=2, seed=11, dtype=dtype)
    double = replace(
        batch,
        q=batch.q.double(),
        k_cache=batch.k_cache.double(),
        v_cache=batch.v_cache.double(),
    )
    there = on(device, double)
    expected = paged_attention(
        there.q, there.k_cache, there.v_cache, there.inputs, scale=shape.scale, window=window
    )[2:].cpu()
    out = run(batch, device, window=window)[2:].double()
    tolerance = 1e-5 if dtype is torch.float32 else 5e-3
    assert (out - expected).norm() / expected.norm() < tolerance

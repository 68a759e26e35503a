"""What the CPU's kernels do to a token's row, against the torch references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cpu_programs import EPS, ROTARY_FACTOR, compute, dims, no_rows, one_op, padded, weights_of
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemesh.kernels.attention import store_kv
from pagemesh.kernels.cpu import program
from pagemesh.kernels.norm import rms_norm
from pagemesh.kernels.rope import apply_rope, rope_cos_sin
from pagemesh.worker_svc.models.packing import Packer, as_bits, quantize_rows

STORED = [torch.float32, torch.bfloat16, torch.float16]


@given(st.integers(1, 130), st.integers(1, 9), st.integers(1, 3), st.integers(0, 2**31))
def test_norm(features, n_rows, n_threads, seed):
    rng = torch.Generator().manual_seed(seed)
    width = padded(features)
    buffers = torch.zeros(2, n_rows, width)
    buffers[0, :, :features] = torch.randn(n_rows, features, generator=rng) * 3
    weight = torch.randn(features, generator=rng)
    op = one_op(program.NORM, x_stride=width, out=n_rows * width, out_stride=width, weight=2)
    constants = np.concatenate([np.full(2, np.nan, np.float32), weight.numpy()])
    compute(op, buffers, n_rows, shape=dims(hidden_size=features),
            weights=weights_of(constants=constants), n_threads=n_threads)  # fmt: skip
    expected = rms_norm(buffers[0, :, :features].double(), weight.double(), np.float32(EPS))
    torch.testing.assert_close(buffers[1, :, :features].double(), expected, atol=1e-6, rtol=1e-5)
    assert not buffers[1, :, features:].any()


@pytest.mark.parametrize("dtype", [*STORED, torch.int8])
@pytest.mark.parametrize(("vocab", "features"), [(70, 33), (64, 16), (1, 1)])
def test_embedding(dtype, vocab, features):
    table = torch.randn(vocab, features)
    packer = Packer(2 * Packer.elements((vocab, features), dtype), dtype)
    packer.matrix(torch.randn(vocab, features), None)
    matrix = packer.matrix(table, None)
    tokens = torch.randint(vocab, (11,))
    buffers = torch.zeros(11, padded(features))
    op = one_op(program.EMBED, out_stride=padded(features), weight=matrix.weight,
                scale=matrix.scale)  # fmt: skip
    shape = dims(hidden_size=features)._replace(inputs_at_once=packer.inputs_at_once)
    compute(op, buffers, 11, shape=shape, weights=packer.weights(),
            rows=no_rows()._replace(token_ids=tokens.numpy()))  # fmt: skip
    if dtype is torch.int8:
        values, scale = quantize_rows(table)
        kept = values.float() * scale[:, None]
    else:
        kept = table.to(dtype).float()
    assert torch.equal(buffers[:, :features], kept[tokens])


@settings(max_examples=50)
@given(
    st.sampled_from(STORED),
    st.sampled_from([(1, 1), (3, 1), (8, 4)]),
    st.sampled_from([2, 8, 10, 24, 64, 80, 96]),
    st.sampled_from([1, 5, 16, 24, 128]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_rotate_and_store(dtype, heads, head_dim, block_tokens, has_norms, seed):
    """Query and key heads are normed and turned, K and V stored, and nothing else is touched."""
    (n_heads, n_kv_heads), n_rows, num_blocks = heads, 6, 5
    rng = torch.Generator().manual_seed(seed)
    width = padded((n_heads + 2 * n_kv_heads) * head_dim)
    both = torch.zeros(n_rows * (width + padded(head_dim)))  # the heads, then their angles
    buffers = both[: n_rows * width].view(n_rows, width)
    used = (n_heads + 2 * n_kv_heads) * head_dim
    buffers[:, :used] = torch.randn(n_rows, used, generator=rng)
    q, k, v = (
        part.unflatten(1, (-1, head_dim)).clone()
        for part in buffers[:, :used].split(
            [n * head_dim for n in (n_heads, n_kv_heads, n_kv_heads)], dim=1
        )
    )
    positions = torch.randint(5000, (n_rows,), generator=rng)
    inv_freq = 1 / 10_000 ** (torch.arange(0, head_dim, 2) / head_dim)
    cos, sin = rope_cos_sin(positions, inv_freq, ROTARY_FACTOR)
    slots = torch.randperm((num_blocks - 1) * block_tokens, generator=rng)[:n_rows] + block_tokens
    slots = torch.nn.functional.pad(slots, (0, n_rows - len(slots)), value=-1)
    slots[2] = -1
    norms = torch.randn(2, head_dim, generator=rng)
    shape = (2, 2, num_blocks, n_kv_heads, block_tokens, head_dim)
    pool = torch.randn(shape, generator=rng).to(dtype)
    expected_pool = pool.clone()

    rows = no_rows()._replace(positions=positions.numpy(), slot_mapping=slots.numpy())
    turn = {"out": n_rows * width, "out_stride": padded(head_dim)}
    constants = torch.cat((norms.ravel(), inv_freq))
    for op in (
        one_op(program.ANGLES, weight=norms.numel(), **turn),
        one_op(program.ROTATE, x_stride=width, layer=1, weight=0 if has_norms else -1, **turn),
    ):
        compute(
            op,
            both,
            n_rows,
            shape=dims(n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim),
            weights=weights_of(as_bits(torch.empty(0, dtype=dtype)), constants.numpy()),
            pool=pool,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            rows=rows,
            n_threads=2,
        )

    if has_norms:
        q, k = rms_norm(q, norms[0], np.float32(EPS)), rms_norm(k, norms[1], np.float32(EPS))
    q, k = apply_rope(q, k, cos, sin)
    got_q, got_k, got_v = (
        part.unflatten(1, (-1, head_dim))
        for part in buffers[:, :used].split(
            [n * head_dim for n in (n_heads, n_kv_heads, n_kv_heads)], dim=1
        )
    )
    torch.testing.assert_close(got_q, q, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(got_k, k, atol=2e-5, rtol=1e-5)
    assert torch.equal(got_v, v)
    keys = as_reference_keys(expected_pool[1, 0])
    store_kv(got_k.to(dtype), v.to(dtype), keys, expected_pool[1, 1], slots)
    assert torch.equal(as_reference_keys(pool[1, 0]), keys)
    assert torch.equal(pool[1, 1], expected_pool[1, 1])
    assert torch.equal(pool[0], expected_pool[0])


def as_reference_keys(pages):
    """[blocks, Hkv, block_tokens, head_dim] of memory that holds [head_dim, block_tokens] pages."""
    blocks, heads, block_tokens, head_dim = pages.shape
    return pages.reshape(blocks, heads, head_dim, block_tokens).transpose(2, 3).contiguous()


def test_angles_of_far_positions():
    positions = torch.tensor([0, 1, 77, 8191, 131_071, 2**24 + 3])
    inv_freq = 1 / 500_000 ** (torch.arange(0, 26, 2) / 26)
    buffers = torch.zeros(6, padded(26))
    op = one_op(program.ANGLES, out_stride=padded(26), weight=1)
    constants = np.concatenate(([np.float32(np.nan)], inv_freq.numpy()))
    compute(op, buffers, 6, shape=dims(head_dim=26), weights=weights_of(constants=constants),
            rows=no_rows()._replace(positions=positions.numpy()))  # fmt: skip
    expected = torch.cat(rope_cos_sin(positions, inv_freq, ROTARY_FACTOR), dim=1)
    torch.testing.assert_close(buffers[:, :26], expected, atol=5e-7, rtol=0)
    assert not buffers[:, 26:].any()

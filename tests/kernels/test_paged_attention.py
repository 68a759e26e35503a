"""The paged attention reference against dense attention, over random paged layouts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_layout import Shape, dense_attention, random_batch

from pagemesh.kernels.attention import paged_attention, store_kv

SHAPES = st.builds(
    Shape,
    n_kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    head_dim=st.sampled_from([2, 8]),
    block_tokens=st.sampled_from([1, 3, 16]),
)
DECODES = st.lists(st.tuples(st.just(1), st.integers(0, 70)), max_size=6)
PREFILLS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 40)).map(lambda nc: (nc[0], sum(nc))), max_size=3
)
WINDOWS = st.one_of(st.none(), st.integers(1, 40))


def check(shape, decodes, prefills, window, seed, *, padding_tokens, dtype, tolerance):
    batch = random_batch(
        shape,
        decodes + prefills,
        n_decode=len(decodes),
        seed=seed,
        padding_tokens=padding_tokens,
        dtype=dtype,
    )
    out = paged_attention(
        batch.q, batch.k_cache, batch.v_cache, batch.inputs, scale=shape.scale, window=window
    )
    assert out.dtype is dtype
    torch.testing.assert_close(
        out.double(), dense_attention(batch, window), atol=tolerance, rtol=tolerance
    )


@settings(max_examples=100, deadline=None)
@given(SHAPES, DECODES, PREFILLS, WINDOWS, st.integers(0, 2**31), st.integers(0, 3))
def test_equals_dense_attention(shape, decodes, prefills, window, seed, padding_tokens):
    check(
        shape,
        decodes,
        prefills,
        window,
        seed,
        padding_tokens=padding_tokens,
        dtype=torch.float32,
        tolerance=1e-5,
    )


@settings(max_examples=40, deadline=None)
@given(SHAPES, DECODES, PREFILLS, WINDOWS, st.integers(0, 2**31))
def test_equals_dense_attention_in_bfloat16(shape, decodes, prefills, window, seed):
    check(
        shape,
        decodes,
        prefills,
        window,
        seed,
        padding_tokens=0,
        dtype=torch.bfloat16,
        tolerance=3e-2,
    )


@pytest.mark.parametrize("window", [None, 100])
def test_very_unequal_lengths_share_a_batch(window):
    """Long rows must not be cut to the length of short ones, nor the reverse, at page borders."""
    shape = Shape(n_kv_heads=2, group=2, head_dim=8, block_tokens=16)
    lengths = [1, 15, 16, 17, 500, 512, 513, 2, 0, 1000]
    decodes = [(1, length) for length in lengths]
    check(
        shape,
        decodes,
        [],
        window,
        seed=0,
        padding_tokens=0,
        dtype=torch.float32,
        tolerance=1e-5,
    )


def test_store_skips_slot_minus_one_and_touches_nothing_else():
    k, v = torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    k_cache, v_cache = torch.randn(3, 2, 4, 8), torch.randn(3, 2, 4, 8)
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    expected_k[2, :, 3], expected_v[2, :, 3] = k[0], v[0]
    expected_k[1, :, 0], expected_v[1, :, 0] = k[3], v[3]
    k[1] = torch.nan
    store_kv(k, v, k_cache, v_cache, torch.tensor([11, -1, -1, 4]))
    assert torch.equal(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)

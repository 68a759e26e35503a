"""Rotation, norms of heads and the store into pages, against the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from elementwise_checks import (
    DTYPES,
    ON_CARD,
    SPLITS,
    assert_rounded_alike,
    linear_output,
    tokens_of,
)
from torch import Tensor

from pagemesh.kernels import rope_store as reference
from pagemesh.kernels.gpu.rope_store import rope_store
from pagemesh.kernels.rope import rope_cos_sin

N_BLOCKS = 7
MAX_POSITIONS = 40


@dataclass(frozen=True)
class Heads:
    n_heads: int
    n_kv_heads: int
    head_dim: int
    block_tokens: int = 16

    @property
    def columns(self) -> int:
        return (self.n_heads + 2 * self.n_kv_heads) * self.head_dim


# Counts that do and do not fill a program.
SHAPES = [Heads(4, 2, 64), Heads(9, 3, 80), Heads(16, 1, 128, 32)]
if ON_CARD:
    SHAPES += [Heads(8, 8, 96), Heads(2, 1, 256), Heads(14, 2, 64, 64)]
    SHAPES += [Heads(16, 8, 128), Heads(32, 8, 128, 128), Heads(40, 40, 128)]


@dataclass
class Call:
    qkv: Tensor
    positions: Tensor
    rotations: Tensor
    slot_mapping: Tensor
    k_cache: Tensor
    v_cache: Tensor
    options: dict[str, Any]

    def run(self, rope_store: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and the two caches afterwards; this call's own caches stay as they are."""
        k_cache, v_cache = self.k_cache.clone(), self.v_cache.clone()
        tables = (self.positions, self.rotations, self.slot_mapping)
        q = rope_store(self.qkv, *tables, k_cache, v_cache, **self.options)
        return q, k_cache, v_cache

    def of(self, chosen: slice) -> Call:
        return Call(
            tokens_of(self.qkv, chosen),
            self.positions[chosen],
            self.rotations,
            self.slot_mapping[chosen],
            self.k_cache,
            self.v_cache,
            self.options,
        )


def random_call(
    heads: Heads, tokens: int, splits: int, dtype: torch.dtype, device: str, **options: Any
) -> Call:
    """Slots are scattered, those of every third token -1; the pool is full of NaN."""
    slots = torch.randperm((N_BLOCKS - 1) * heads.block_tokens)[:tokens] + heads.block_tokens
    slots[1::3] = -1
    inv_freq = 10000.0 ** -(torch.arange(0, heads.head_dim, 2) / heads.head_dim)
    rotations = torch.cat(rope_cos_sin(torch.arange(MAX_POSITIONS), inv_freq, 1.1), dim=-1)
    pool = (N_BLOCKS, heads.n_kv_heads, heads.block_tokens, heads.head_dim)
    k_cache, v_cache = (torch.full(pool, torch.nan, dtype=dtype, device=device) for _ in range(2))
    k_cache[0], v_cache[0] = 0, 0
    return Call(
        linear_output(tokens, heads.columns, splits, dtype, device),
        torch.randint(MAX_POSITIONS, (tokens,), device=device),
        rotations.to(device),
        slots.to(device),
        k_cache,
        v_cache,
        {"n_heads": heads.n_heads, **options},
    )


def norms(heads: Heads, dtype: torch.dtype, device: str) -> dict[str, Any]:
    q_norm, k_norm = torch.randn(2, heads.head_dim, device=device).to(dtype)
    return {"q_norm": q_norm, "k_norm": k_norm, "eps": 1e-6}


def bias(heads: Heads, dtype: torch.dtype, device: str) -> dict[str, Any]:
    return {"bias": torch.randn(heads.columns, device=device).to(dtype)}


def assert_same_pages(got: Tensor, expected: Tensor) -> None:
    assert torch.equal(got.isnan(), expected.isnan())
    assert_rounded_alike(got.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_rotated_and_stored_to_the_bit(heads, splits, dtype, device):
    call = random_call(heads, 4, splits, dtype, device, **bias(heads, dtype, device))
    for got, expected in zip(call.run(rope_store), call.run(reference.rope_store), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_heads_are_normalised_before_they_turn(heads, splits, dtype, device):
    call = random_call(heads, 4, splits, dtype, device, **norms(heads, dtype, device))
    (q, k, v), (q_expected, k_expected, v_expected) = (
        call.run(each) for each in (rope_store, reference.rope_store)
    )
    assert_rounded_alike(q, q_expected)
    assert_same_pages(k, k_expected)
    torch.testing.assert_close(v, v_expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", SPLITS)
def test_a_token_has_the_same_bits_alone_and_beside_nan(splits, dtype, device):
    heads = Heads(9, 3, 128)
    options = norms(heads, dtype, device) | bias(heads, dtype, device)
    call = random_call(heads, 5, splits, dtype, device, **options)
    call.qkv[..., 2, :] = torch.nan
    q, *caches = call.run(rope_store)
    alone, *alone_caches = call.of(slice(3, 4)).run(rope_store)
    assert torch.equal(q[3:4], alone)
    slot = int(call.slot_mapping[3])
    block, offset = divmod(slot, heads.block_tokens)
    for cache, alone_cache in zip(caches, alone_caches, strict=True):
        assert torch.equal(cache[block, :, offset], alone_cache[block, :, offset])
        assert not cache[block, :, offset].isnan().any()


def test_padding_stores_nothing(device):
    heads = Heads(4, 2, 64)
    call = random_call(heads, 4, 1, torch.float32, device)
    call.slot_mapping.fill_(-1)
    _, *caches = call.run(rope_store)
    for cache in caches:
        assert torch.equal(cache[0], torch.zeros_like(cache[0]))
        assert cache[1:].isnan().all()


def test_no_tokens(device):
    heads = Heads(4, 2, 64)
    q, *_ = random_call(heads, 0, 1, torch.float32, device).run(rope_store)
    assert q.shape == (0, 4, 64)

"""Vectors of the CPU's kernels: what memory holds, and the exponential."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from pagemesh.kernels.cpu.exponential import exp
from pagemesh.kernels.cpu.jit import LANES
from pagemesh.kernels.cpu.simd import (
    largest_of,
    load,
    load_one,
    only_between,
    store,
    store_one,
    sum_of,
)
from pagemesh.worker_svc.models.packing import as_bits

STORED = [torch.float32, torch.bfloat16, torch.float16]
SIZES = sorted({0, 1, LANES - 1, LANES, LANES + 1, 3 * LANES + 2})


@njit
def copy_vectors(source, target, n):
    for i in range(0, n, LANES):
        store(target, i, n - i, load(source, i, n - i))


@njit
def copy_each(source, target, n):
    for i in range(n):
        store_one(target, i, load_one(source, i))


@njit
def exp_each(x, out):
    for i in range(0, len(x), LANES):
        store(out, i, len(x) - i, exp(load(x, i, len(x) - i)))


@njit
def fold(x):
    lanes = load(x, 0, LANES)
    return sum_of(lanes), largest_of(lanes)


@njit
def cut(x, low, high, out):
    store(out, 0, LANES, only_between(load(x, 0, LANES), low, high, np.float32(-1.0)))


def hard_numbers() -> torch.Tensor:
    """float32 of every exponent, ties between neighbours of the narrow types, and specials."""
    rng = np.random.default_rng(0)
    any_bits = rng.integers(0, 2**32, 20_000, dtype=np.uint32).view(np.float32)
    bfloat16_ties = (rng.integers(0, 2**16, 2000, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    halves = rng.integers(0, 0x7BFF, 2000, dtype=np.uint16)  # finite, as is the next one
    low, high = (bits.view(np.float16).astype(np.float32) for bits in (halves, halves + 1))
    float16_ties = (low + high) / 2
    specials = [0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.996, 65520, 1e-8, 2**-25, 3e-39]
    numbers = [any_bits, bfloat16_ties, float16_ties, -float16_ties, np.array(specials, np.float32)]
    return torch.from_numpy(np.concatenate(numbers))


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    """NaN may have any payload."""
    integers = torch.int32 if got.dtype is torch.float32 else torch.int16
    assert torch.equal(got.isnan(), expected.isnan())
    real = ~expected.isnan()
    assert torch.equal(got[real].view(integers), expected[real].view(integers))


@pytest.mark.parametrize("copy", [copy_vectors, copy_each])
@pytest.mark.parametrize("dtype", STORED)
def test_store_rounds_as_torch_does(dtype, copy):
    numbers = hard_numbers()
    got = torch.zeros(len(numbers), dtype=dtype)
    copy(numbers.numpy(), as_bits(got), len(numbers))
    assert_same_bits(got, numbers.to(dtype))


@pytest.mark.parametrize("copy", [copy_vectors, copy_each])
@pytest.mark.parametrize("dtype", [*STORED, torch.int8])
def test_load_widens_every_number(dtype, copy):
    if dtype is torch.int8:
        stored = torch.arange(-128, 128).to(torch.int8)
    else:
        stored = torch.arange(-(2**15), 2**15).to(torch.int16)
        stored = stored.float() if dtype is torch.float32 else stored.view(dtype)
    got = np.empty(len(stored), np.float32)
    copy(as_bits(stored), got, len(stored))
    assert_same_bits(torch.from_numpy(got), stored.float())


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("n", SIZES)
def test_nothing_is_written_past_the_count(dtype, n):
    target = torch.full((n + LANES,), 7, dtype=dtype)
    copy_vectors(np.zeros(n + LANES, np.float32), as_bits(target), n)
    assert torch.equal(target, torch.tensor([0] * n + [7] * LANES, dtype=dtype))


def test_exp_is_within_two_units_in_the_last_place():
    x = np.concatenate([np.linspace(-87, 88, 200_001), np.linspace(-1, 1, 50_001)])
    x = x.astype(np.float32)
    got = np.empty_like(x)
    exp_each(x, got)
    exact = np.exp(x.astype(np.float64))
    units = np.abs(got - exact) / np.spacing(exact.astype(np.float32))
    assert units.max() < 2


def test_exp_of_specials():
    x = np.array([0.0, -0.0, -np.inf, -87.1, np.inf, 1000.0, np.nan], np.float32)
    got = np.empty_like(x)
    exp_each(x, got)
    most = np.exp(np.float64(88))
    np.testing.assert_allclose(got, [1, 1, 0, 0, most, most, np.nan], rtol=1e-6)
    assert got[:4].tolist() == [1, 1, 0, 0]


def test_folds():
    x = np.arange(LANES, dtype=np.float32)
    np.random.default_rng(0).shuffle(x)
    assert fold(x) == (LANES * (LANES - 1) / 2, LANES - 1)
    assert fold(-x) == (-LANES * (LANES - 1) / 2, 0)


@pytest.mark.parametrize("low", [-(2**40), -1, 0, 1, LANES - 1, LANES, 2**40])
@pytest.mark.parametrize("high", [-(2**40), 0, 1, 3, LANES, LANES + 1, 2**40])
def test_only_between(low, high):
    x, out = np.arange(LANES, dtype=np.float32), np.empty(LANES, np.float32)
    cut(x, low, high, out)
    assert out.tolist() == [i if low <= i < high else -1 for i in range(LANES)]

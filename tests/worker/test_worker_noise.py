"""Noise: the integer arithmetic exactly, the statistics as far as a sampler depends on them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemesh.kernels.noise import gumbel, gumbel_of_bits, row_keys, token_bits
from pagemesh.kernels.sampling import sample

INT64 = st.integers(-(2**63), 2**63 - 1)
GOLDEN = [
    [2615854991, 3466763690, 3942217363],
    [1204830205, 1906549743, 3537147536],
    [4247532098, 3434033076, 1357375436],
]
VOCAB = torch.arange(49152, dtype=torch.int32)


def mix64(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def key_reference(seed: int, position: int) -> int:
    mixed = mix64((seed + 0x9E3779B97F4A7C15) % 2**64)
    return mix64(mixed ^ position * 0xD1342543DE82EF95 % 2**64)


def bits_reference(key: int, token_id: int) -> int:
    x = (token_id * 0x9E3779B1 + key) % 2**32
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x ^= key >> 32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def keys_of(seeds: list[int], positions: list[int]) -> torch.Tensor:
    return row_keys(torch.tensor(seeds), torch.tensor(positions))


@settings(deadline=None)
@given(seed=INT64, position=st.integers(0, 2**31), token_id=st.integers(0, 2**31 - 1))
def test_bits_are_those_of_unsigned_arithmetic(seed: int, position: int, token_id: int) -> None:
    key = keys_of([seed], [position])
    assert key.item() % 2**64 == key_reference(seed, position)
    bits = token_bits(key, torch.tensor([token_id], dtype=torch.int32))
    assert bits.item() % 2**32 == bits_reference(key_reference(seed, position), token_id)


def test_golden_bits() -> None:
    """A change here changes what every seed generates."""
    keys = keys_of([0, 1, -1], [0, 7, 100000])
    bits = token_bits(keys[:, None], torch.tensor([0, 1, 49151], dtype=torch.int32))
    assert (bits.to(torch.int64) % 2**32).tolist() == GOLDEN


def test_a_row_does_not_depend_on_the_rows_and_tokens_beside_it() -> None:
    keys = keys_of([5, 6, 7], [1, 1, 1])
    whole = gumbel(keys[:, None], VOCAB)
    picked = torch.tensor([17, 3, 40000], dtype=torch.int32)
    assert torch.equal(gumbel(keys[1], picked), whole[1][picked.to(torch.int64)])


def uniforms(keys: torch.Tensor) -> torch.Tensor:
    return (token_bits(keys[:, None], VOCAB).to(torch.float64) + 2**31) / 2**32


@pytest.mark.parametrize("seed", [0, 1, 2, -1, 2**62])
def test_bits_are_uniform(seed: int) -> None:
    counts = torch.histc(uniforms(keys_of([seed], [3])), bins=256, min=0, max=1)
    expected = len(VOCAB) / 256
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert abs(chi_square - 255) < 6 * math.sqrt(2 * 255)


def test_every_bit_is_fair() -> None:
    keys = keys_of([11] * 8, list(range(8)))
    bits = token_bits(keys[:, None], VOCAB).to(torch.int64)
    n = bits.numel()
    for bit in range(32):
        share = ((bits >> bit) & 1).double().mean().item()
        assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(n)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1].item()


def test_neighbours_are_uncorrelated() -> None:
    """Across token ids, positions, seeds, and a seed's shift against a position's."""
    n = 8
    base = uniforms(keys_of([100] * n, list(range(n))))
    bound = 5 / math.sqrt(base.numel())
    assert abs(correlation(base[:, 1:], base[:, :-1])) < bound
    assert abs(correlation(base[:, 2:], base[:, :-2])) < bound
    for other in (
        keys_of([100] * n, list(range(1, n + 1))),
        keys_of([101] * n, list(range(n))),
        keys_of([99] * n, list(range(1, n + 1))),
        keys_of([-100] * n, list(range(n))),
    ):
        assert abs(correlation(base, uniforms(other))) < bound


def test_gumbel_moments_and_extremes() -> None:
    keys = keys_of([1] * 16, list(range(16)))
    noise = gumbel(keys[:, None], VOCAB).double()
    assert noise.mean().item() == pytest.approx(0.57722, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.02)
    extremes = gumbel_of_bits(torch.tensor([0, -1, 1, -(2**31), 2**31 - 1], dtype=torch.int32))
    assert extremes.isfinite().all()
    assert extremes[0] == extremes.max()
    assert extremes[0].item() == pytest.approx(32 * math.log(2), abs=0.01)


@pytest.mark.parametrize(("seed_step", "position_step"), [(1, 0), (0, 1)])
def test_sampled_frequencies_match_softmax(seed_step: int, position_step: int) -> None:
    n = 20000
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0, 1.0, -torch.inf])
    steps = torch.arange(n)
    keys = row_keys(42 + seed_step * steps, 7 + position_step * steps)
    counts = torch.bincount(sample(logits.repeat(n, 1), keys), minlength=len(logits))
    expected = n * logits.softmax(0)
    assert counts[-1] == 0
    chi_square = ((counts - expected)[:-1] ** 2 / expected[:-1]).sum().item()
    assert chi_square < 24.1  # 6 degrees of freedom, p = 0.0005


def test_small_probabilities_are_drawn_as_often_as_they_should() -> None:
    """One token of 1e-4 beside a near certain one: the upper tail of the noise decides."""
    n, p = 200_000, 1e-4
    logits = torch.tensor([math.log(1 - p), math.log(p)])
    keys = row_keys(torch.arange(n), torch.zeros(n, dtype=torch.int64))
    drawn = int(sample(logits.repeat(n, 1), keys).sum())
    assert abs(drawn - n * p) < 5 * math.sqrt(n * p)

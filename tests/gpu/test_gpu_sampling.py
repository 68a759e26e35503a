"""Noise, filters and the draw on a device against their references."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from sampling_rows import (
    ROW_TOKENS,
    Way,
    expected_tokens,
    filters_of,
    poisoned,
    positions_of,
    rows_of,
)

from pagemesh.kernels import noise as reference_noise
from pagemesh.kernels.gpu.filters import SearchConfig, survey, thresholds
from pagemesh.kernels.gpu.noise import gumbel_bound, gumbel_of_bits, row_key, token_bits
from pagemesh.kernels.gpu.sampling import SampleConfig, sample_rows
from pagemesh.kernels.sampling import thresholds as reference_thresholds

ON_CARD = torch.cuda.is_available()
LARGE = [128256, 151936] if ON_CARD else []
FILTERS = list(product([0, 1, 5, 50, 5000], [1.0, 0.9, 0.3, 1e-6], [0.0, 0.05]))
WAYS = [
    Way(0.0),
    Way(0.0, 5, 0.9),
    *(Way((0.7, 1.0, 1.6)[i % 3], *found) for i, found in enumerate(FILTERS)),
]
GOLDEN = [
    [2615854991, 3466763690, 3942217363],
    [1204830205, 1906549743, 3537147536],
    [4247532098, 3434033076, 1357375436],
]


@triton.jit
def _noise(seeds, positions, ids, keys, bits, noise, bounds, size: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, size)
    seed = seeds + 2 * row
    key = row_key(tl.load(seed), tl.load(seed + 1), tl.load(positions + row))
    tl.store(keys + row, key.to(tl.int64, bitcast=True))
    mixed = token_bits(key, tl.load(ids + i))
    tl.store(bits + row * size + i, mixed)
    tl.store(noise + row * size + i, gumbel_of_bits(mixed))
    tl.store(bounds + row * size + i, gumbel_bound(mixed))


def noise_of(
    seeds: list[int], positions: list[int], ids: torch.Tensor, device: str
) -> tuple[torch.Tensor, ...]:
    """Keys, bits, noise and its bounds."""
    words = torch.tensor(seeds).view(torch.int32).to(device)
    shape = len(seeds), len(ids)
    out = (
        torch.empty(len(seeds), dtype=torch.int64, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
        torch.empty(shape, device=device),
        torch.empty(shape, device=device),
    )
    place = torch.tensor(positions, device=device)
    _noise[(len(seeds),)](words, place, ids.to(device), *out, len(ids))
    return tuple(part.cpu() for part in out)


def test_golden_bits(device: str) -> None:
    """A change here changes what every seed generates."""
    ids = torch.tensor([0, 1, 49151, 7], dtype=torch.int32)
    _, bits, _, _ = noise_of([0, 1, -1], [0, 7, 100000], ids, device)
    assert (bits[:, :3].to(torch.int64) % 2**32).tolist() == GOLDEN


def test_noise_is_the_reference(device: str) -> None:
    """Bit for bit up to the logarithms, and never above its bound."""
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), *range(4)]
    positions = [0, 7, 100000, 2**31 - 1, 3, *range(4)]
    ids = torch.randint(0, 2**31 - 1, (1024,), dtype=torch.int32)
    keys, bits, noise, bounds = noise_of(seeds, positions, ids, device)
    assert torch.equal(keys, reference_noise.row_keys(torch.tensor(seeds), torch.tensor(positions)))
    assert torch.equal(bits, reference_noise.token_bits(keys[:, None], ids))
    expected = reference_noise.gumbel_of_bits(bits)
    torch.testing.assert_close(noise, expected, atol=3e-6, rtol=1e-6)
    assert (bounds > expected).all()
    assert (bounds - expected)[expected > 5].max() < 0.07


@triton.jit
def _noise_of_bits(bits, noise, bounds, size: tl.constexpr):
    i = tl.arange(0, size)
    given = tl.load(bits + i)
    tl.store(noise + i, gumbel_of_bits(given))
    tl.store(bounds + i, gumbel_bound(given))


def test_noise_at_its_ends(device: str) -> None:
    small = [0, -1, 1, 2, 63, 64, 127, -128]
    large = [-(2**31), 2**31 - 1, 2**31 - 65, 2**30, 2**25, -(2**25), 2**26, 2**24]
    bits = torch.tensor(small + large, dtype=torch.int32)
    noise, bounds = torch.empty(16, device=device), torch.empty(16, device=device)
    _noise_of_bits[(1,)](bits.to(device), noise, bounds, 16)
    expected = reference_noise.gumbel_of_bits(bits)
    torch.testing.assert_close(noise.cpu(), expected, atol=3e-6, rtol=1e-6)
    assert (bounds.cpu() > expected).all()


def random_logits(n_rows: int, vocab_tokens: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    """Coarse ones, so that many are equal."""
    torch.manual_seed(0)
    return (torch.randn(n_rows, vocab_tokens) * 12).round().div(4).to(device, dtype)


@pytest.mark.parametrize("vocab_tokens", [300, 1031, *LARGE])
@pytest.mark.parametrize("slice_tokens", [128, 4096])
def test_tokens_are_those_of_the_reference(
    device: str, dtype: torch.dtype, vocab_tokens: int, slice_tokens: int
) -> None:
    """The order of slices, of programs and of the search makes no difference."""
    ways = WAYS if ON_CARD else WAYS[slice_tokens // 4096 :: 3 if vocab_tokens == 300 else 8]
    logits = random_logits(len(ways), vocab_tokens, device, dtype)
    out = poisoned(len(ways), device)
    config = SampleConfig(slice_tokens, 4)
    sample_rows(logits, rows_of(ways, device), out, filtered=True, config=config)
    expected = expected_tokens(logits, ways)
    assert out.result.tolist() == [expected, [1] * len(ways)]
    known = torch.full((len(ways), ROW_TOKENS), -7)
    known[range(len(ways)), positions_of(ways)] = torch.tensor(expected)
    assert torch.equal(out.token_ids.cpu(), known.to(torch.int32))


@pytest.mark.parametrize("vocab_tokens", [700, *LARGE])
def test_rows_without_filters_need_no_survey(
    device: str, dtype: torch.dtype, vocab_tokens: int
) -> None:
    ways = [Way(0.0), Way(1.0), Way(0.3), Way(2.0)] * 3
    logits = random_logits(len(ways), vocab_tokens, device, dtype)
    out = poisoned(len(ways), device)
    sample_rows(logits, rows_of(ways, device), out, filtered=False)
    assert out.result[0].tolist() == expected_tokens(logits, ways)


def hard_rows(vocab_tokens: int) -> torch.Tensor:
    """Rows in which a search could go wrong; edited ones, so some tokens are banned."""
    torch.manual_seed(1)
    equal = torch.full((vocab_tokens,), 1.5)
    rising = torch.linspace(-4, 4, vocab_tokens)
    zeros = torch.zeros(vocab_tokens)
    zeros[::2] = -0.0
    banned = torch.randn(vocab_tokens)
    banned[torch.randperm(vocab_tokens)[: vocab_tokens - 3]] = -math.inf
    one = torch.full((vocab_tokens,), -math.inf)
    one[vocab_tokens // 2] = -3.0
    close = 1 + torch.randint(0, 3, (vocab_tokens,)) * 2.0**-23
    crowded = torch.full((vocab_tokens,), -9.0)
    crowded[:64] = torch.linspace(2, 3, 64)[: min(64, vocab_tokens)]
    spread = torch.randn(vocab_tokens) * 1e4
    return torch.stack((equal, rising, zeros, banned, one, close, crowded, spread))


@pytest.mark.parametrize(
    ("vocab_tokens", "search"),
    [
        (1, SearchConfig()),
        (200, SearchConfig()),
        (4500, SearchConfig(near_groups=8, far_groups=16, num_warps=8)),
        *((vocab_tokens, SearchConfig()) for vocab_tokens in LARGE),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "way",
    [
        Way(0.9, 3),
        Way(0.7, 70),
        Way(0.7, 70, 0.9),
        Way(1.0, 10**9),
        Way(1.0, 0, 0.5),
        Way(1.1, 0, 1e-6),
        Way(1.0, 0, 0.999),
        Way(1.0, 20, 0.8, 0.01),
        Way(1.0, 0, 0.7, 0.2),
        Way(1.0, 0, 1.0, 0.9),
    ],
    ids=str,
)
def test_thresholds_keep_the_same_tokens(
    device: str, way: Way, vocab_tokens: int, search: SearchConfig
) -> None:
    logits = hard_rows(max(vocab_tokens, 64))[:, :vocab_tokens].contiguous()
    logits[:, 0] = logits[:, 0].clamp(min=-5)
    if not ON_CARD and vocab_tokens > 1000:
        logits = logits[[1, 5, 6]]
    ways = [way] * len(logits)
    rows = rows_of(ways, device)
    on_device = logits.to(device)
    found = thresholds(on_device, rows, survey(on_device, rows, edited=True), search).cpu()
    scaled = logits * torch.tensor(np.float32(1 / way.temperature))
    expected = reference_thresholds(scaled, filters_of(ways))
    kept, expected_kept = (
        (scaled >= smallest[:, None]).sum(1, dtype=torch.float64) for smallest in (found, expected)
    )
    # Of very many tokens, one or two may lie within the rounding of the sum.
    torch.testing.assert_close(kept, expected_kept, rtol=2e-5, atol=0)


@pytest.mark.filterwarnings("ignore:invalid value")  # of NumPy, in the interpreter
@pytest.mark.parametrize("way", [Way(0.0), Way(1.0), Way(1.0, 5), Way(1.0, 0, 0.9)], ids=str)
def test_a_row_that_is_not_finite_spoils_itself_alone(
    device: str, dtype: torch.dtype, way: Way
) -> None:
    ways = [way] * 5
    logits = random_logits(5, 500, device, dtype)
    logits[0, 3], logits[2, 499], logits[3, 130] = math.nan, -math.inf, math.inf
    out = poisoned(5, device)
    sample_rows(logits, rows_of(ways, device), out, filtered=way.top_k > 0 or way.top_p < 1)
    expected = expected_tokens(logits, ways)
    assert out.result[0].tolist() == [0, expected[1], 0, 0, expected[4]]
    assert out.result[1].tolist() == [0, 1, 0, 0, 1]


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of NumPy, in the interpreter
@pytest.mark.parametrize("way", [Way(0.0), Way(1.0), Way(1.0, 5)], ids=str)
def test_nan_beside_tokens_that_would_win(device: str, dtype: torch.dtype, way: Way) -> None:
    """Whole stretches of it, such as damaged rows of a head leave, in any order: a search for the
    best between them must end."""
    ways = [way] * 8
    logits = random_logits(8, 5000, device, dtype)
    stretches = logits[:, :4992].view(8, -1, 32)
    stretches[torch.rand(stretches.shape[:2]) < 0.5] = math.nan
    out = poisoned(8, device)
    sample_rows(logits, rows_of(ways, device), out, filtered=way.top_k > 0)
    assert out.result.tolist() == [[0] * 8, [0] * 8]


def test_padding_rows_are_left_alone(device: str) -> None:
    ways = [Way(1.0, 5), Way(1.0), Way(0.0)]
    logits = random_logits(3, 300, device, torch.float32)
    logits[1] = math.nan
    rows, out = rows_of(ways, device), poisoned(3, device)
    rows.slots[1] = -1
    sample_rows(logits, rows, out, filtered=True)
    expected = expected_tokens(logits.nan_to_num(), ways)
    assert out.result.tolist() == [[expected[0], -7, expected[2]], [1, -7, 1]]
    assert (out.token_ids[1] == -7).all()


def test_a_token_past_the_end_of_its_slot_is_not_written(device: str) -> None:
    rows, out = rows_of([Way(0.0)] * 2, device), poisoned(2, device)
    rows.positions[0] = ROW_TOKENS
    sample_rows(random_logits(2, 300, device, torch.float32), rows, out, filtered=False)
    assert out.token_ids[0].tolist() == [-7] * ROW_TOKENS
    assert out.token_ids[1].tolist()[2:] == [-7] * (ROW_TOKENS - 2)


def test_no_rows(device: str) -> None:
    sample_rows(torch.empty(0, 300, device=device), rows_of([], device), poisoned(0, device),
                filtered=True)  # fmt: skip


@pytest.mark.gpu
def test_the_launches_can_be_captured(dtype: torch.dtype) -> None:
    """A graph reads what is in its buffers when it is launched."""
    ways = WAYS
    rows = rows_of(ways, "cuda")
    logits, out = random_logits(len(ways), 151936, "cuda", dtype), poisoned(len(ways), "cuda")
    sample_rows(logits, rows, out, filtered=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample_rows(logits, rows, out, filtered=True)
    logits.copy_(logits.roll(1, 1))
    graph.replay()
    assert out.result[0].tolist() == expected_tokens(logits, ways)

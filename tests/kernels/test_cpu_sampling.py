"""The CPU's sampling kernels against their references."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from torch import Tensor

from pagemesh.kernels.cpu.jit import LANES
from pagemesh.kernels.cpu.sampling import CpuSampling
from pagemesh.kernels.cpu.sampling_noise import gumbel, gumbel_bound, magnitudes, row_key
from pagemesh.kernels.cpu.simd import load, store
from pagemesh.kernels.cpu.team import Team
from pagemesh.kernels.logprobs import token_logprobs
from pagemesh.kernels.noise import gumbel as reference_gumbel
from pagemesh.kernels.noise import gumbel_of_bits, row_keys, token_bits
from pagemesh.kernels.sample_rows import PARAMS, Edits, SamplingInputs, sample_rows
from pagemesh.kernels.sampling import Filters, thresholds

INT64 = st.integers(-(2**63), 2**63 - 1)
# Few distinct values, so that ties are common, and two neighbours; sizes around a vector's end.
HALF_UP = float(np.nextafter(np.float32(0.5), np.float32(1.0)))
VALUES = st.sampled_from([-math.inf, -3.0, -1.0, -0.0, 0.0, 0.5, 0.5, HALF_UP, 2.0, 7.25])
SIZES = st.integers(1, 2 * LANES + 3)
ROW = SIZES.flatmap(lambda n: st.lists(VALUES, min_size=n, max_size=n)).filter(
    lambda row: max(row) > -math.inf
)
ROWS_ALIKE = 16


@pytest.fixture(scope="module")
def team():
    return Team(3)


def params_of(n: int, **columns: object) -> np.ndarray:
    params = np.zeros(n, PARAMS)
    off = {"count_row": -1, "top_p": 1, "log_min_p": -np.inf, "repetition": 1}
    for name, value in (off | columns).items():
        params[name] = value
    return params


def inputs_of(params: np.ndarray, n_tokens: int, edits: Edits | None = None) -> SamplingInputs:
    n = len(params)
    none = Edits(np.zeros(n + 1, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))
    seen = torch.zeros((0, n_tokens), dtype=torch.bool)
    return SamplingInputs(
        params, np.arange(n), edits or none, seen, torch.zeros((0, n_tokens), dtype=torch.int32)
    )


def noisy_of(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """float32[R, V]: what a draw maximises, -inf where the filters keep nothing."""
    params = inputs.params
    scaled = logits * torch.from_numpy(params["inverse_temperature"].copy()).unsqueeze(1)
    columns = (torch.from_numpy(params[name].copy()) for name in Filters._fields)
    kept = scaled >= thresholds(scaled, Filters(*columns)).unsqueeze(1)
    keys = row_keys(torch.from_numpy(params["seed"].copy()), torch.from_numpy(inputs.positions))
    noise = reference_gumbel(keys[:, None], torch.arange(logits.shape[1], dtype=torch.int32))
    return (scaled + noise).masked_fill(~kept, -torch.inf)


def assert_drawn(logits: Tensor, inputs: SamplingInputs, tokens: Tensor) -> None:
    """Each token is the winner, but for what the two sides' logarithms differ by."""
    noisy = noisy_of(logits, inputs)
    chosen = noisy.gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(chosen, noisy.max(dim=1).values, atol=1e-5, rtol=1e-6)


@settings(deadline=None)
@given(
    row=ROW,
    scale=st.sampled_from([1e-3, 0.7, 1.0, 1e5]),
    top_k=st.sampled_from([0, 1, 2, 5, 16, 17, 40, 2**31 - 1]),
    top_p=st.sampled_from([1e-6, 0.1, 0.35, 0.62, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 0.9, 1.0]),
    seed=INT64,
)
def test_draws_are_those_of_the_reference(row, scale, top_k, top_p, min_p, seed):
    logits = torch.tensor(row).repeat(ROWS_ALIKE, 1)
    # Bans of values that are not finite, as far as the row's finiteness is concerned, are edits.
    banned = np.flatnonzero(np.isneginf(row))
    edits = Edits(
        np.arange(ROWS_ALIKE + 1) * len(banned),
        np.tile(banned, ROWS_ALIKE),
        np.full(ROWS_ALIKE * len(banned), -np.inf, np.float32),
    )
    log_min_p = np.log(min_p) if min_p > 0 else -np.inf
    params = params_of(
        ROWS_ALIKE,
        seed=seed,
        inverse_temperature=scale,
        top_k=top_k,
        top_p=top_p,
        log_min_p=log_min_p,
    )
    inputs = inputs_of(params, len(row), edits)
    given_logits = logits.masked_fill(logits.isneginf(), 1.0)
    tokens, finite = CpuSampling().sample_rows(given_logits, inputs)
    assert finite.all()
    assert torch.equal(given_logits, logits)
    assert_drawn(logits, inputs, tokens)


@settings(deadline=None, max_examples=60)
@given(
    n=st.sampled_from([1, LANES - 1, LANES, 1000, 1003]),
    spread=st.sampled_from([0.0, 1e-6, 1.0, 30.0, 1e30]),
    top_k=st.integers(0, 1100),
    top_p=st.floats(2.0**-20, 1.0, width=32),
    seed=st.integers(0, 2**32),
)
def test_many_different_logits(n, spread, top_k, top_p, seed):
    logits = torch.randn(4, n, generator=torch.Generator().manual_seed(seed)) * spread
    params = params_of(4, seed=seed, inverse_temperature=1.0, top_k=top_k, top_p=top_p)
    inputs = inputs_of(params, n)
    tokens, finite = CpuSampling().sample_rows(logits, inputs)
    assert finite.all()
    assert_drawn(logits, inputs, tokens)


@settings(deadline=None)
@given(row=ROW, data=st.data())
def test_greedy_takes_the_first_of_the_best_and_finds_what_is_not_finite(row, data):
    finite_row = [max(value, -9.0) for value in row]
    broken = list(finite_row)
    place = data.draw(st.integers(0, len(row) - 1))
    broken[place] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    logits = torch.tensor([finite_row, broken, finite_row])
    tokens, finite = CpuSampling().sample_rows(logits, inputs_of(params_of(3), len(row)))
    best = finite_row.index(max(finite_row))
    assert tokens.tolist() == [best, 0, best]
    assert finite.tolist() == [True, False, True]
    assert logits[1].tolist() == [0.0] * len(row)
    assert logits[[0, 2]].tolist() == [finite_row] * 2


@settings(deadline=None)
@given(
    n_tokens=SIZES,
    seen=st.sets(st.integers(0, 2 * LANES + 2)),
    output=st.lists(st.integers(0, 2 * LANES + 2), max_size=8),
    bias=st.dictionaries(
        st.integers(0, 2 * LANES + 2), st.sampled_from([-100.0, -math.inf, 0.5]), max_size=4
    ),
    repetition=st.sampled_from([0.5, 1.0, 1.3]),
    frequency=st.sampled_from([-1.5, 0.0, 0.7]),
    presence=st.sampled_from([-0.5, 0.0, 2.0]),
    seed=st.integers(0, 2**32),
)
def test_edits_and_penalties_are_those_of_the_reference(
    n_tokens, seen, output, bias, repetition, frequency, presence, seed
):
    counts = torch.zeros((3, n_tokens), dtype=torch.int32)
    for token in output:
        counts[2, token % n_tokens] += 1
    is_seen = counts > 0
    is_seen[2, [token for token in seen if token < n_tokens]] = True
    params = params_of(
        4, count_row=[-1, 2, -1, 2], repetition=repetition, frequency=frequency, presence=presence
    )
    bias = {token: value for token, value in bias.items() if token < n_tokens}
    starts = np.array([0, 0, 0, len(bias), 2 * len(bias)])
    ids = np.array([*bias, *bias], np.int64)
    edits = Edits(starts, ids, np.array([*bias.values()] * 2, np.float32))
    inputs = SamplingInputs(params, np.arange(4), edits, is_seen, counts)
    logits = torch.randn(4, n_tokens, generator=torch.Generator().manual_seed(seed)) * 3
    expected_logits = logits.clone()
    expected, _ = sample_rows(expected_logits, inputs)
    tokens, finite = CpuSampling().sample_rows(logits, inputs)
    assert torch.equal(logits, expected_logits)
    assert torch.equal(tokens, expected)
    assert finite.all()


@pytest.mark.parametrize("columns", [{}, {"top_p": 0.5}, {"top_k": 3}, {"log_min_p": -1.0}])
def test_a_row_whose_tokens_are_all_banned_gives_the_first(columns):
    ids = np.tile(np.arange(20), 2)
    edits = Edits(np.array([0, 20, 40]), ids, np.full(40, -np.inf, np.float32))
    params = params_of(2, inverse_temperature=[0.0, 1.0], **columns)
    tokens, finite = CpuSampling().sample_rows(torch.randn(2, 20), inputs_of(params, 20, edits))
    assert tokens.tolist() == [0, 0]
    assert finite.all()


def mixed_batch(n: int, n_tokens: int) -> tuple[Tensor, SamplingInputs]:
    """Rows of every kind; every seventh is not finite."""
    rows = np.arange(n)
    params = params_of(
        n,
        seed=rows,
        inverse_temperature=rows % 4,
        top_k=np.where(rows % 3 == 0, 20, 0),
        top_p=np.where(rows % 5 == 0, 0.7, 1.0),
    )
    logits = torch.randn(n, n_tokens, generator=torch.Generator().manual_seed(n))
    logits[::7, 5] = torch.nan
    return logits, inputs_of(params, n_tokens)


def test_a_row_does_not_depend_on_the_rows_and_threads_beside_it(team):
    logits, inputs = mixed_batch(41, 3001)
    targets = torch.arange(41)
    cpu = CpuSampling(team)
    for _ in range(20):
        together = logits.clone()
        tokens, finite = cpu.sample_rows(together, inputs)
        scores, _ = cpu.token_logprobs(together, targets, targets, 3)
    for row in range(len(logits)):
        alone = logits[row : row + 1].clone()
        part = inputs_of(inputs.params[row : row + 1], 3001)._replace(
            positions=inputs.positions[row : row + 1]
        )
        token, is_finite = CpuSampling().sample_rows(alone, part)
        assert (token.item(), is_finite[0]) == (tokens[row].item(), finite[row])
        score, _ = CpuSampling().token_logprobs(alone, torch.tensor([0]), targets[row : row + 1], 3)
        assert all(torch.equal(a[0], b[row]) for a, b in zip(score, scores, strict=True))


def test_a_batch_of_all_kinds_gives_what_the_reference_gives(team):
    logits, inputs = mixed_batch(41, 3001)
    expected, finite = sample_rows(logits.clone(), inputs)
    tokens, kernels_finite = CpuSampling(team).sample_rows(logits, inputs)
    assert torch.equal(tokens, expected)
    assert np.array_equal(kernels_finite, finite)


def test_scores_of_rows_that_are_not_finite_are_those_of_zeros(team):
    logits, _ = mixed_batch(15, 100)
    rows = torch.arange(15)
    scores, finite = CpuSampling(team).token_logprobs(logits, rows, rows, 2)
    assert finite.tolist() == [row % 7 != 0 for row in range(15)]
    assert logits.isfinite().all()
    torch.testing.assert_close(scores.values[7], torch.full((3,), -math.log(100)))
    assert scores.ids[7].tolist() == [7, 0, 1]
    assert scores.ranks[7] == 1


def test_drawn_frequencies_match_the_filtered_softmax(team):
    n = 20000
    row = torch.tensor([1.5, 1.0, 0.5, 0.0, -0.5, -4.0])
    inputs = inputs_of(params_of(n, seed=9, inverse_temperature=1.0, top_k=4), len(row))
    tokens, _ = CpuSampling(team).sample_rows(row.repeat(n, 1), inputs)
    counts = torch.bincount(tokens, minlength=len(row))
    expected = n * row[:4].softmax(0)
    assert counts[4:].sum() == 0
    assert ((counts[:4] - expected) ** 2 / expected).sum().item() < 17.8  # 3 degrees, p = 0.0005


@settings(deadline=None)
@given(row=ROW, top=st.sampled_from([0, 1, 3, 20, 64]), data=st.data())
def test_logprobs_are_those_of_the_reference(row, top, data):
    chosen = torch.tensor([data.draw(st.integers(0, len(row) - 1)), 0])
    logits = torch.tensor([[9.0] * len(row), row, [1.0] * len(row)])
    rows = torch.tensor([1, 2])
    expected, _ = token_logprobs(logits, rows, chosen, top)
    (ids, values, ranks), _ = CpuSampling().token_logprobs(logits, rows, chosen, top)
    torch.testing.assert_close(values, expected.values, atol=1e-5, rtol=1e-5)
    assert torch.equal(ranks, expected.ranks)
    width = min(top, len(row))
    in_order = logits[rows].argsort(dim=1, descending=True, stable=True)[:, :width]
    assert torch.equal(ids, torch.cat((chosen[:, None], in_order), dim=1).to(torch.int32))


@njit
def noise_lanes(seed, position, first, bits, noise):
    magnitude = magnitudes(row_key(seed, position), first)
    store(bits, 0, LANES, magnitude)
    store(noise, 0, LANES, gumbel(magnitude))


@njit
def noise_of(numbers, noise, bound):
    for i in range(0, len(numbers), LANES):
        magnitude = load(numbers, i, len(numbers) - i)
        store(noise, i, len(numbers) - i, gumbel(magnitude))
        store(bound, i, len(numbers) - i, gumbel_bound(magnitude))


@settings(deadline=None)
@given(seed=INT64, position=st.integers(0, 2**31), first=st.integers(0, 2**31 - 1 - LANES))
def test_noise_has_the_integers_of_the_reference(seed, position, first):
    magnitude, noise = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    noise_lanes(seed, position, first, magnitude, noise)
    ids = torch.arange(first, first + LANES, dtype=torch.int32)
    bits = token_bits(row_keys(torch.tensor([seed]), torch.tensor([position]))[:, None], ids)[0]
    assert torch.equal(torch.from_numpy(magnitude), (bits.to(torch.float32) + 0.5).abs())
    expected = gumbel_of_bits(bits)
    torch.testing.assert_close(torch.from_numpy(noise), expected, atol=1e-6, rtol=1e-6)


def test_noise_is_accurate_and_below_its_bound_over_the_whole_range():
    ends = torch.tensor([0, 1, 2, 2**31 - 1, 2**31 - 128, 2**31 - 256])
    powers = 2 ** torch.arange(31)
    bits = torch.cat((ends, powers, powers - 1, torch.randint(2**31, (100_000,)))).to(torch.int32)
    numbers = (bits.to(torch.float32) + 0.5).abs().numpy()
    noise, bound = np.empty_like(numbers), np.empty_like(numbers)
    noise_of(numbers, noise, bound)
    v = np.minimum(numbers.astype(np.float64) * 2.0**-31, 1 - 2.0**-24)
    np.testing.assert_allclose(noise, -np.log(-np.log1p(-v)), rtol=3e-7, atol=3e-7)
    assert (noise <= bound).all()
    assert noise.max() == pytest.approx(32 * math.log(2), abs=1e-3)


@pytest.mark.parametrize("columns", [{"top_p": 1e-50}, {"top_k": 3}, {"top_p": 0.5}, {}])
@pytest.mark.parametrize("scale", [1.0, 3e38])
def test_parameters_at_the_edge_of_float32_end(columns, scale):
    """A top_p that is zero in float32 keeps the best alone; a best that overflows is certain."""
    logits = torch.tensor([[0.0, 3.0, 40.0, 39.0, -2.0]]).repeat(8, 1)
    params = params_of(8, seed=np.arange(8), inverse_temperature=scale, **columns)
    tokens, finite = CpuSampling().sample_rows(logits, inputs_of(params, 5))
    assert finite.all()
    if scale > 1 or columns.get("top_p") == 1e-50:
        assert tokens.tolist() == [2] * 8
    else:
        assert set(tokens.tolist()) <= {1, 2, 3}

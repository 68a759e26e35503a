"""Filters, penalties and logprobs against naive references."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemesh.kernels.logprobs import token_logprobs
from pagemesh.kernels.noise import gumbel, row_keys
from pagemesh.kernels.penalties import Penalties, add_bias, apply_penalties
from pagemesh.kernels.sampling import Filters, sample, sample_filtered, thresholds
from pagemesh.kernels.search import argmax, count_above, largest, where

# Few distinct values, so that ties are common.
VALUES = st.sampled_from([-math.inf, -3.0, -1.0, 0.0, 0.0, 0.5, 0.5, 2.0, 7.25])
ROW = st.lists(VALUES, min_size=2, max_size=12).filter(lambda row: max(row) > -math.inf)
TOP_P = st.sampled_from([1e-6, 0.1, 0.35, 0.62, 0.9, 0.99, 1.0])
MIN_P = st.sampled_from([0.0, 0.05, 0.3, 0.9, 1.0])


def kept_tokens(row: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """By sorting the whole row."""
    order = sorted((i for i in range(len(row)) if row[i] > -math.inf), key=lambda i: -row[i])
    best = row[order[0]]
    order = [i for i in order if math.exp(row[i] - best) >= min_p * (1 - 1e-9)]
    if top_k > 0:
        kth = row[order[min(top_k, len(order)) - 1]]
        order = [i for i in order if row[i] >= kth]
    weights = {i: math.exp(row[i] - best) for i in order}
    total = sum(weights.values())
    better = {i: sum(w for j, w in weights.items() if row[j] > row[i]) for i in order}
    return {i for i in order if top_p >= 1 or better[i] < top_p * total}


def filters_of(n: int, top_k: int, top_p: float, min_p: float) -> Filters:
    return Filters(torch.full((n,), top_k), torch.full((n,), top_p), torch.full((n,), min_p).log())


@settings(deadline=None)
@given(
    row=ROW,
    top_k=st.integers(0, 14),
    top_p=TOP_P,
    min_p=MIN_P,
    window=st.integers(1, 12),
    seed=st.integers(0, 2**32),
)
def test_filters_keep_what_sorting_keeps_whatever_the_window(
    row: list[float], top_k: int, top_p: float, min_p: float, window: int, seed: int
) -> None:
    n = 16
    scaled = torch.tensor(row).repeat(n, 1)
    filters = filters_of(n, top_k, top_p, min_p)
    kept = sorted(kept_tokens(row, top_k, top_p, min_p))
    above = (scaled >= thresholds(scaled, filters, window).unsqueeze(1)) & ~scaled.isneginf()
    assert [ids.nonzero().squeeze(1).tolist() for ids in above] == [kept] * n
    keys = row_keys(torch.full((n,), seed), torch.arange(n))
    noisy = scaled + gumbel(keys[:, None], torch.arange(len(row), dtype=torch.int32))
    expected = torch.tensor(kept)[noisy[:, kept].argmax(dim=1)]
    assert torch.equal(sample_filtered(scaled, keys, filters), expected)


def test_rows_keep_their_own_filters() -> None:
    """A row that must look at the whole vocabulary beside rows settled in the first window."""
    torch.manual_seed(0)
    scaled = torch.randn(6, 3000)
    keys = row_keys(torch.arange(6), torch.arange(6))
    filters = Filters(
        torch.tensor([1, 0, 2999, 50, 0, 0]),
        torch.tensor([1.0, 0.999999, 1.0, 0.5, 0.8, 1.0]),
        torch.tensor([0.0, 0.0, 0.0, 0.1, 0.0, 1e-5]).log(),
    )
    together = sample_filtered(scaled, keys, filters)
    for row in range(6):
        alone = slice(row, row + 1)
        index = torch.tensor([row])
        assert sample_filtered(scaled[alone], keys[alone], filters.rows(index)) == together[row]
    assert together[0] == scaled[0].argmax()


def test_filters_that_keep_all_equal_the_plain_draw() -> None:
    torch.manual_seed(1)
    scaled = torch.randn(64, 1000)
    keys = row_keys(torch.arange(64), torch.zeros(64, dtype=torch.int64))
    assert torch.equal(
        sample_filtered(scaled, keys, filters_of(64, 1000, 1.0, 0.0)), sample(scaled, keys)
    )


def test_filtered_frequencies_match_the_renormalised_softmax() -> None:
    n = 20000
    row = torch.tensor([1.5, 1.0, 0.5, 0.0, -0.5, -4.0])
    keys = row_keys(torch.full((n,), 9), torch.arange(n))
    drawn = sample_filtered(row.repeat(n, 1), keys, filters_of(n, 4, 1.0, 0.0))
    counts = torch.bincount(drawn, minlength=len(row))
    expected = n * row[:4].softmax(0)
    assert counts[4:].sum() == 0
    assert ((counts[:4] - expected) ** 2 / expected).sum().item() < 17.8  # 3 degrees, p = 0.0005


VECTOR = st.lists(st.sampled_from([-2.0, -1.0, 0.0, 3.5, -math.inf]), min_size=5, max_size=5)


@settings(deadline=None)
@given(rows=st.lists(VECTOR, min_size=1, max_size=4), n=st.integers(1, 5), bound=st.integers(-2, 2))
def test_searches_match_those_of_torch(rows: list[list[float]], n: int, bound: int) -> None:
    values = torch.tensor(rows)
    bounds = torch.full((len(rows),), float(bound))
    assert torch.equal(largest(values, n), values.topk(n, dim=1).values)
    assert argmax(values).tolist() == [row.index(max(row)) for row in rows]
    assert torch.equal(count_above(values, bounds), (values > bound).sum(dim=1))
    found = where(values > bound)
    for ours, theirs in zip(found, (values > bound).nonzero(as_tuple=True), strict=True):
        assert torch.equal(ours, theirs)


@settings(deadline=None)
@given(
    row=st.lists(st.sampled_from([-2.5, -1.0, 0.0, 0.75, 4.0, -math.inf]), min_size=6, max_size=6),
    prompt=st.lists(st.integers(0, 5), max_size=8),
    output=st.lists(st.integers(0, 5), max_size=8),
    repetition=st.sampled_from([0.5, 1.0, 1.3]),
    frequency=st.sampled_from([-1.5, 0.0, 0.7]),
    presence=st.sampled_from([-0.5, 0.0, 2.0]),
)
def test_penalties_match_a_loop(
    row: list[float],
    prompt: list[int],
    output: list[int],
    repetition: float,
    frequency: float,
    presence: float,
) -> None:
    expected = list(row)
    for token in {*prompt, *output}:
        value = expected[token]
        expected[token] = value / repetition if value > 0 else value * repetition
    for token in set(output):
        expected[token] -= frequency * output.count(token) + presence
    logits = torch.tensor([[9.0] * 6, row, [9.0] * 6])
    seen = torch.zeros(3, 6, dtype=torch.bool)
    counts = torch.zeros(3, 6, dtype=torch.int32)
    seen[2, prompt + output] = True
    for token in output:
        counts[2, token] += 1
    apply_penalties(
        logits,
        torch.tensor([1]),
        seen,
        counts,
        torch.tensor([2]),
        Penalties(*(torch.tensor([value]) for value in (repetition, frequency, presence))),
    )
    torch.testing.assert_close(logits[1], torch.tensor(expected))
    assert (logits[[0, 2]] == 9.0).all()


def test_bias_adds_up_and_bans_win() -> None:
    logits = torch.zeros(2, 4)
    rows, ids = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([1, 1, 3, 0, 0])
    add_bias(logits, rows, ids, torch.tensor([2.0, 0.5, -1.0, 100.0, -math.inf]))
    assert logits.tolist() == [[0.0, 2.5, 0.0, 0.0], [-math.inf, 0.0, 0.0, -1.0]]


def test_logprobs_match_log_softmax() -> None:
    torch.manual_seed(2)
    logits = torch.randn(5, 50) * 10
    chosen = torch.tensor([0, 49, 7, 7, int(logits[4].argmax())])
    (ids, values, ranks), finite = token_logprobs(logits, torch.arange(5), chosen, 6)
    assert finite.all()
    expected = logits.log_softmax(dim=1)
    torch.testing.assert_close(values, expected.gather(1, ids.to(torch.int64)))
    assert torch.equal(ids[:, 0].to(torch.int64), chosen)
    assert torch.equal(ids[:, 1:].to(torch.int64), logits.topk(6).indices)
    order = logits.argsort(dim=1, descending=True)
    assert ranks.tolist() == [
        order[row].tolist().index(chosen[row]) + 1 for row in range(len(chosen))
    ]


@pytest.mark.parametrize("top", [0, 3, 99])
def test_logprobs_of_as_many_tokens_as_there_are(top: int) -> None:
    (ids, values, ranks), finite = token_logprobs(
        torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([0]), torch.tensor([1]), top
    )
    assert finite.all()
    assert ids.shape == values.shape == (1, 1 + min(top, 3))
    assert ranks.tolist() == [1]

"""The rules of beam search, without a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemesh.beam_search import BeamSearch

VOCAB = 4
END = 0
MAX_TOKENS = 4


def logprobs_after(seed: int, ids: Sequence[int]) -> list[float]:
    """Of a model made of a hash."""
    weights = [1 + hash((seed, *ids, token)) % 1000 for token in range(VOCAB)]
    return [math.log(weight / sum(weights)) for weight in weights]


def search(seed: int, width: int, penalty: float, ends: Sequence[int]) -> BeamSearch:
    beams = BeamSearch(width, MAX_TOKENS, penalty, ends)
    while beams.beams:
        nexts = []
        for beam in beams.beams:
            ranked = sorted(enumerate(logprobs_after(seed, beam.ids)), key=lambda one: -one[1])
            nexts.append(ranked[: beams.n_next])
        parents = beams.advance(nexts)
        assert len(parents) == len(beams.beams) <= width
    return beams


def score(seed: int, ids: Sequence[int], penalty: float) -> float:
    total = sum(logprobs_after(seed, ids[:i])[token] for i, token in enumerate(ids))
    return total / len(ids) ** penalty


@given(seed=st.integers(0, 10**6), penalty=st.sampled_from([0.0, 1.0]))
def test_as_wide_as_all_sequences_it_finds_the_best(seed: int, penalty: float) -> None:
    found = search(seed, VOCAB**MAX_TOKENS, penalty, []).results
    best = max(score(seed, ids, penalty) for ids in product(range(VOCAB), repeat=MAX_TOKENS))
    assert found[0].score == pytest.approx(best)
    assert len(found) == VOCAB**MAX_TOKENS


@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 5),
    penalty=st.floats(-1, 2),
    ends=st.sampled_from([[], [END], [END, 3]]),
)
def test_results_are_sequences_with_their_scores_best_first(
    seed: int, width: int, penalty: float, ends: list[int]
) -> None:
    found = search(seed, width, penalty, ends).results
    assert found
    assert len(found) <= width
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    assert len({tuple(one.ids) for one in found}) == len(found)
    for one in found:
        assert one.score == pytest.approx(score(seed, one.ids, penalty))
        ended = one.ids[-1] in ends
        assert one.finish_reason == ("stop" if ended else "length")
        assert ended or len(one.ids) == MAX_TOKENS
        assert not set(one.ids[:-1]) & set(ends)


def test_it_stops_when_no_beam_would_be_a_result_if_it_ended_now() -> None:
    """And an end that is not among the best `width` is no result."""
    beams = BeamSearch(1, 10, 1.0, [END])
    assert beams.advance([[(1, -1.0), (END, -1.5)]]) == [0]
    assert beams.results == []
    assert beams.advance([[(END, -0.2), (2, -2.0)]]) == []
    [result] = beams.results
    assert (result.ids, result.score, result.finish_reason) == ([1, END], -0.6, "stop")

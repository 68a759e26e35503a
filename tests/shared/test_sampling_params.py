"""The bounds of SamplingParams that keep a float32 sampler finite."""

from __future__ import annotations

import math

import pytest

from pagemesh.shared.sampling import SamplingParams


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
@pytest.mark.parametrize("value", [-1.0, 1.001e3, 1e300, math.inf, math.nan])
def test_values_that_float32_cannot_follow_are_refused_with_the_bounds(
    name: str, value: float
) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be between .* and 1000, got"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("penalty", [0.0, 1e-4])
def test_a_repetition_penalty_that_divides_to_infinity_is_refused(penalty: float) -> None:
    with pytest.raises(ValueError, match=r"^repetition_penalty must be between 0\.001 and 1000"):
        SamplingParams(repetition_penalty=penalty)


def test_a_stop_string_needs_a_text_to_stand_in() -> None:
    with pytest.raises(ValueError, match=r"^stop is looked for in the text: it needs detokenize"):
        SamplingParams(stop="a", detokenize=False)


def test_the_bounds_themselves_pass() -> None:
    assert SamplingParams(temperature=0.0, repetition_penalty=1e-3).is_greedy
    assert not SamplingParams(temperature=1e3, repetition_penalty=1e3).is_greedy


def test_another_seed_changes_nothing_else() -> None:
    params = SamplingParams(n=2, stop="a", temperature=0.5)
    assert params.with_seed(7) == SamplingParams(n=2, stop="a", temperature=0.5, seed=7)
    assert params.seed is None

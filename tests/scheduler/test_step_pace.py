"""The pace of steps, fitted to what they took."""

from __future__ import annotations

import pytest

from pagemesh.scheduler_svc.step_pace import PaceMeter
from pagemesh.shared.step_stats import StepPace


def observed(*steps: tuple[int, float]) -> StepPace:
    meter = PaceMeter()
    for n_tokens, elapsed_s in steps:
        meter.observe(n_tokens, elapsed_s)
    return meter.pace()


def test_the_pace_of_steps_on_a_line_is_found() -> None:
    steps = [(n, 0.01 + n * 0.0002) for n in (1, 7, 16, 16, 100, 512, 3000)]
    assert observed(*steps) == pytest.approx((0.01, 0.0002))


def test_one_size_of_steps_says_nothing() -> None:
    assert observed() == observed((8, 0.01), (15, 0.02)) == StepPace()
    assert observed((8, 0.0), (1000, 0.0)) == StepPace()


def test_a_few_prompts_are_not_drowned_out_by_many_tokens() -> None:
    meter = PaceMeter()
    meter.observe(2000, 0.41)
    for number in range(10_000):
        meter.observe(16, 0.012 + 0.002 * (number % 2))
    assert meter.pace().token_s == pytest.approx(0.0002, rel=0.02)


def test_a_new_pace_replaces_the_old_one() -> None:
    meter = PaceMeter()
    for token_s in (0.001, 0.0001):
        for _ in range(100):
            for n_tokens in (1, 500):
                meter.observe(n_tokens, 0.01 + n_tokens * token_s)
    assert meter.pace() == pytest.approx((0.01, 0.0001), rel=0.1)


def test_no_step_takes_less_for_more_tokens() -> None:
    assert observed((1, 0.02), (1000, 0.01)).token_s == 0

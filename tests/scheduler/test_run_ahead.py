"""The number of steps out at a time follows from how long they take."""

from __future__ import annotations

import pytest

from pagemesh.scheduler_svc.run_ahead import RunAhead


def after(times_s: list[float], given: int | None = None) -> int:
    run_ahead = RunAhead(given)
    for time_s in times_s:
        run_ahead.landed(time_s)
    return run_ahead.depth


@pytest.mark.parametrize(
    ("times_s", "depth"),
    [
        ([], 2),
        ([0.0] * 5, 2),
        ([0.001], 3),
        ([0.005], 2),
        ([0.005] + [0.001] * 50, 3),
        ([0.001] + [0.0025] * 100, 3),
        ([0.004] + [0.0025] * 100, 2),
        ([0.001] * 10 + [0.02], 3),
        ([0.001] * 10 + [0.02] * 10, 2),
    ],
)
def test_short_steps_run_further_ahead(times_s: list[float], depth: int) -> None:
    assert after(times_s) == depth


@pytest.mark.parametrize("given", [1, 2, 5])
def test_a_depth_that_is_given_stays(given: int) -> None:
    assert after([0.0001] * 20, given) == given

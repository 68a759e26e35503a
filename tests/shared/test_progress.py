"""How long a step may take, and how long it has taken."""

from __future__ import annotations

import pytest

from pagemesh.shared.progress import LOOK_S, LivedTime, StepPatience, Wait


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    lived = LivedTime(100.0)
    assert lived.look(100.0 + LOOK_S) == LOOK_S
    assert lived.look(5000.0) == 2 * LOOK_S
    assert lived.look(5000.0 + LOOK_S) == LOOK_S


def patience(*landed: tuple[int, float]) -> StepPatience:
    patience = StepPatience(60.0)
    for n_tokens, elapsed_s in landed:
        patience.landed(n_tokens, elapsed_s)
    return patience


@pytest.mark.parametrize(
    ("landed", "n_tokens", "limit_s"),
    [
        ([(64, 0.1)], 64, 60.0),
        ([(64, 0.1)], 128, 60.0),
        ([(64, 0.1)], 129, 600.0),  # larger than any before
        ([], 1, 600.0),
        ([], 0, 60.0),  # an idle worker's probe
        ([(512, 30.0)], 512, 300.0),  # a slow machine
        ([(512, 30.0), *[(1, 0.1)] * 1000], 512, 60.0),  # of late it was not
        ([(64, 0.1), (64, 3600.0)], 64, 600.0),  # the process was stopped for an hour
    ],
)
def test_the_limit_of_a_step(
    landed: list[tuple[int, float]], n_tokens: int, limit_s: float
) -> None:
    assert patience(*landed).limit_s(n_tokens) == pytest.approx(limit_s)


def test_who_waits_for_something_else_begins_anew() -> None:
    wait = Wait()
    first, second = (1,), (2,)
    for _ in range(3):
        wait.look(first, 1.0)
    assert wait.age_s == 2.0
    wait.look(second, 1.0)
    assert wait.age_s == 0.0
    wait.look(second, 1.0)
    assert wait.age_s == 1.0
    wait.look(None, 1.0)
    wait.look(None, 1.0)
    assert wait.age_s == 0.0

"""Requests that arrive together with the same prefix: it is computed once, and a failure of who
computes it is nobody else's."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_helpers import OWNER, Driver, Seen, expected_answer, make_capacity, make_submit

SHARED = [3 + i % 50 for i in range(100)]
PROMPTS = [[*SHARED, 60 + i, 70, 71, 72, 73, 74] for i in range(4)]


def driver_of(*, budget: int = 250, **settings: Any) -> Driver:
    capacity = make_capacity(num_blocks=200, max_num_seqs=16, budget=budget)
    return Driver(capacity=capacity, **{"run_ahead_depth": 3, **settings})


def submit_all(driver: Driver, prompts: list[list[int]] = PROMPTS) -> list[Seen]:
    return [driver.submit(make_submit(key, prompt)) for key, prompt in enumerate(prompts)]


def entered(driver: Driver) -> list[list[tuple[int, int]]]:
    """(prompt tokens, of which computed before) of the rows new in each step."""
    return [[(row.n_prompt, row.computed) for row in step.new] for step in driver.steps]


def check(seen: list[Seen], prompts: list[list[int]] = PROMPTS) -> None:
    for answer, prompt in zip(seen, prompts, strict=True):
        assert answer.error is None
        assert answer.ids == expected_answer(prompt, 8)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_common_prefix_is_computed_once_and_read_in_the_next_step(depth: int) -> None:
    driver = driver_of(run_ahead_depth=depth)
    seen = submit_all(driver)
    driver.run()
    check(seen)
    assert entered(driver)[:2] == [[(106, 0)], [(106, 100)] * 3]
    assert [answer.started for answer in seen] == [[0], [100], [100], [100]]


def test_others_do_not_wait_with_them() -> None:
    driver = driver_of()
    prompts = [PROMPTS[0], PROMPTS[1], [5, 6, 7], PROMPTS[2]]
    seen = submit_all(driver, prompts)
    driver.run()
    check(seen, prompts)
    assert entered(driver)[:2] == [[(106, 0), (3, 0)], [(106, 100)] * 2]


@pytest.mark.parametrize("common", [40, 60])
def test_for_a_few_tokens_or_the_smaller_part_nobody_waits(common: int) -> None:
    driver = driver_of()
    prompts = [[*SHARED[:common], *([60 + i] * (common + 30))] for i in range(2)]
    seen = submit_all(driver, prompts)
    driver.plan()
    assert len(driver.steps[0].new) == 2
    driver.run()
    check(seen, prompts)


def test_a_prefix_over_several_steps_is_waited_for() -> None:
    """But not for the few tokens that are left of it in the last one."""
    driver = driver_of(budget=40)
    seen = submit_all(driver)
    driver.run()
    check(seen)
    assert [computed for step in entered(driver) for _, computed in step] == [0, 80, 100, 100]


def test_without_prefix_caching_nothing_is_borrowed() -> None:
    driver = driver_of(prefix_caching=False)
    seen = submit_all(driver)
    driver.run()
    check(seen)
    assert {computed for step in entered(driver) for _, computed in step} == {0}


def test_prompts_that_are_scored_compute_everything() -> None:
    driver = driver_of()
    first = driver.submit(make_submit(0, PROMPTS[0]))
    scored = driver.submit(make_submit(1, PROMPTS[1], prompt_logprobs=1))
    driver.run()
    check([first, scored], PROMPTS[:2])
    assert entered(driver)[0] == [(106, 0), (106, 0)]


@pytest.mark.parametrize("fault", ["failed", "nonfinite"])
@pytest.mark.parametrize("lender_is_over", [False, True])
def test_a_failure_is_the_lenders_alone(fault: str, lender_is_over: bool) -> None:
    driver = driver_of()
    seen = submit_all(driver)
    driver.plan(**{fault: [0]})
    driver.plan()
    driver.plan()  # the borrowers decode already, on what was never computed
    if lender_is_over:
        driver.engine.end(OWNER, [0], "abort", 0.0)
    driver.run()
    assert (seen[0].ids, seen[0].error is None) == ([], lender_is_over)
    check(seen[1:], PROMPTS[1:])
    assert driver.engine.audit() == []


def test_who_borrowed_from_a_borrower_starts_again_too() -> None:
    """The second extends the first's prompt, the third the second's."""
    driver = driver_of()
    second = [*SHARED, *([61] * 80)]
    prompts = [[*SHARED, 60], second, [*second, *([62] * 10)]]
    seen = submit_all(driver, prompts)
    driver.plan(failed=[0])
    driver.plan()
    driver.plan()
    assert [computed for step in entered(driver) for _, computed in step] == [0, 100, 180]
    driver.run()
    assert seen[0].error == "step_failed"
    check(seen[1:], prompts[1:])


def test_choices_of_a_borrower_start_again_with_it() -> None:
    driver = driver_of()
    submit_all(driver, PROMPTS[:1])
    seen = [
        driver.submit(make_submit(1 + i, PROMPTS[1], group="g", choice=i, request_id="r"))
        for i in range(3)
    ]
    driver.plan(failed=[0])
    driver.plan()
    driver.plan()
    assert len(driver.steps[2].new) == 2
    driver.run()
    check(seen, [PROMPTS[1]] * 3)


def test_an_abort_of_the_lender_leaves_the_borrowers_alone() -> None:
    driver = driver_of()
    seen = submit_all(driver)
    driver.plan()
    driver.plan()
    driver.engine.end(OWNER, [0], "abort", 0.0)
    driver.run()
    check(seen[1:], PROMPTS[1:])
    assert sum(len(step.new) for step in driver.steps) == 4


def test_a_gap_takes_back_lender_and_borrowers() -> None:
    driver = driver_of()
    driver.submit(make_submit(9, [3, 4]))
    driver.step()
    seen = submit_all(driver)
    lost = driver.engine.plan(0.0)
    assert lost is not None
    assert [row.n_prompt for row in lost.new] == [106]
    driver.plan()
    assert len(driver.steps[1].new) == 3
    driver.run()
    check(seen)


def test_memory_that_runs_out_changes_no_answer() -> None:
    """Lender and borrowers are preempted in the middle."""
    capacity = make_capacity(num_blocks=45, max_num_seqs=16, budget=250)
    driver = Driver(capacity=capacity, run_ahead_depth=3)
    seen = [
        driver.submit(make_submit(key, prompt, max_tokens=40)) for key, prompt in enumerate(PROMPTS)
    ]
    driver.run()
    assert driver.engine.counters.preemptions > 0
    for answer, prompt in zip(seen, PROMPTS, strict=True):
        assert answer.ids == expected_answer(prompt, 40)

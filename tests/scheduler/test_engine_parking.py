"""Requests that park with their one token, for others to fork their pages: so beams are made."""

from __future__ import annotations

import pytest
from scheduler_helpers import OWNER, Driver, expected_answer, make_capacity, make_submit

from pagemesh.shared.engine_messages import NewRow, Submit
from pagemesh.shared.wire import unpack_ids

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
"""Two blocks and a half."""


def parking(key: int, ids: list[int], parent: int = -1) -> Submit:
    return make_submit(key, ids, max_tokens=1, parks=True, parent=parent)


def new_rows(driver: Driver) -> list[NewRow]:
    return [new for step in driver.steps for new in step.new]


def drain(driver: Driver) -> None:
    """Until nothing more can be planned or landed, though something may be parked."""
    while driver.plan() is not None or driver.land():
        pass


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("n_prompt", [7, 8, 9, 10])
def test_forks_of_one_that_is_parked_compute_their_own_token_alone(
    prefix_caching: bool, n_prompt: int
) -> None:
    driver, prompt = Driver(prefix_caching=prefix_caching), PROMPT[:n_prompt]
    driver.submit(parking(0, prompt))
    drain(driver)
    assert driver.seen[OWNER, 0].ids == expected_answer(prompt, 1)
    assert not driver.engine.idle
    for key, token in ((1, 20), (2, 21)):
        driver.submit(parking(key, [*prompt, token], parent=0))
    drain(driver)
    assert [new.computed for new in new_rows(driver)] == [0, n_prompt, n_prompt]
    for key, token in ((1, 20), (2, 21)):
        assert driver.seen[OWNER, key].ids == expected_answer([*prompt, token], 1)
    first, *forks = (unpack_ids(new.blocks) for new in new_rows(driver))
    n_full = n_prompt // 4
    assert all(fork[:n_full] == first[:n_full] for fork in forks)
    assert len({fork[n_full] for fork in forks} | {*first[n_full : n_full + 1]}) >= 2


def test_a_parent_may_be_gone_before_and_pages_live_as_long_as_who_shares_them() -> None:
    driver = Driver()
    driver.submit(parking(0, PROMPT))
    drain(driver)
    driver.submit(parking(1, [*PROMPT, 20], parent=0))
    drain(driver)
    driver.engine.end(OWNER, [0], "stop", 0.0)
    driver.submit(parking(2, [*PROMPT, 20, 21], parent=1))
    driver.submit(parking(3, [*PROMPT, 22], parent=0))
    drain(driver)
    assert driver.seen[OWNER, 2].ids == expected_answer([*PROMPT, 20, 21], 1)
    assert driver.seen[OWNER, 3].ids == expected_answer([*PROMPT, 22], 1)
    driver.engine.end(OWNER, [1, 2, 3], "stop", 0.0)
    driver.run()
    assert driver.engine.audit() == []
    assert driver.engine.stats().kv_usage == 0


def test_one_with_another_beginning_or_salt_forks_nothing() -> None:
    driver = Driver(prefix_caching=False)
    driver.submit(parking(0, PROMPT))
    drain(driver)
    driver.submit(parking(1, [*PROMPT[:-1], 20, 21], parent=0))
    driver.submit(parking(2, [*PROMPT, 20], parent=0)._replace(cache_salt="pepper"))
    driver.submit(parking(3, PROMPT[:8], parent=0))
    drain(driver)
    assert [new.computed for new in new_rows(driver)] == [0, 0, 0, 0]


@pytest.mark.parametrize("room", [{"num_blocks": 5}, {"max_num_seqs": 1}], ids=str)
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_what_is_parked_makes_room_when_nobody_can_enter(
    room: dict[str, int], prefix_caching: bool
) -> None:
    driver = Driver(capacity=make_capacity(**room), prefix_caching=prefix_caching, watermark=0.0)
    prompts = {key: [*PROMPT, 10 + key] for key in (1, 2, 3)}
    driver.submit(parking(0, PROMPT))
    for key, prompt in prompts.items():
        driver.submit(parking(key, prompt, parent=0))
    drain(driver)
    for key, prompt in prompts.items():
        assert driver.seen[OWNER, key].ids == expected_answer(prompt, 1)
    driver.engine.end(OWNER, [0, 1, 2, 3], "stop", 0.0)
    driver.run()
    assert driver.engine.audit() == []


def test_a_worker_that_lost_its_batch_is_sent_what_is_parked_again() -> None:
    driver = Driver()
    driver.submit(parking(0, PROMPT))
    drain(driver)
    driver.pending.append(driver.worker.notice_gap())
    driver.land()
    driver.submit(parking(1, [*PROMPT, 20], parent=0))
    drain(driver)
    assert driver.seen[OWNER, 0].ids == expected_answer(PROMPT, 1)
    assert driver.seen[OWNER, 1].ids == expected_answer([*PROMPT, 20], 1)
    assert [new.computed for new in new_rows(driver)] == [0, len(PROMPT), len(PROMPT)]

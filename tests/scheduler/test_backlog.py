"""The bounds of an engine's queue, and who is turned away when they are reached."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_helpers import OWNER, make_capacity, make_card, make_submit
from worker_model import EPOCH

from pagemesh.scheduler_svc.backlog import Pace
from pagemesh.scheduler_svc.engine import Engine
from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import WireError
from pagemesh.shared.settings import SchedulerSettings

PROMPT = [3, 4, 5, 6, 7]


def engine_of(**settings: Any) -> Engine:
    """With one slot, which a request without end takes."""
    engine = Engine(
        "engine",
        make_card(),
        make_capacity(max_num_seqs=1),
        SchedulerSettings(**settings),
        epoch=EPOCH,
        prefix_caching=False,
    )
    engine.submit(OWNER, make_submit(0, PROMPT, max_tokens=100), 0.0)
    assert engine.plan(0.0) is not None
    return engine


def refused(engine: Engine, now_s: float = 1.0) -> dict[int, WireError]:
    frames = engine.expire(now_s)
    return dict(frames[OWNER].failed) if OWNER in frames else {}


def test_a_full_queue_is_answered_with_a_time_to_come_back() -> None:
    engine = engine_of(max_waiting=2)
    for key in (1, 2):
        engine.submit(OWNER, make_submit(key, PROMPT), 0.0)
    with pytest.raises(RequestError, match="2 requests with 10 prompt tokens") as caught:
        engine.submit(OWNER, make_submit(3, PROMPT), 4.0)
    assert (caught.value.status, caught.value.code) == (429, "engine_overloaded")
    assert caught.value.retry_after_s == 1.0  # nothing is known yet
    assert engine.n_waiting == 2


def test_waiting_tokens_are_bounded_but_any_prompt_may_wait_alone() -> None:
    engine = engine_of(max_waiting_tokens=8)
    engine.submit(OWNER, make_submit(1, PROMPT * 4), 0.0)
    with pytest.raises(RequestError, match="20 prompt tokens"):
        engine.submit(OWNER, make_submit(2, [3]), 0.0)
    engine.end(OWNER, [1], "abort", 0.0)
    for key, prompt in ((3, PROMPT), (4, [3, 4, 5])):
        engine.submit(OWNER, make_submit(key, prompt), 0.0)
    assert engine.n_waiting == 2


def test_a_higher_priority_takes_the_place_of_the_last_of_the_lowest() -> None:
    engine = engine_of(max_waiting=3, scheduling_policy="priority")
    for key, priority in ((1, 5), (2, 0), (3, 5)):
        engine.submit(OWNER, make_submit(key, PROMPT, priority=priority), float(key))
    engine.submit(OWNER, make_submit(4, PROMPT, priority=1), 4.0)
    failed = refused(engine)
    assert list(failed) == [3]
    assert (failed[3].status, failed[3].code) == (429, "engine_overloaded")
    assert failed[3].retry_after_s is not None
    with pytest.raises(RequestError):
        engine.submit(OWNER, make_submit(5, PROMPT, priority=5), 5.0)
    assert engine.n_waiting == 3


def test_nobody_goes_for_a_newcomer_that_would_not_fit_then_either() -> None:
    engine = engine_of(max_waiting_tokens=20, scheduling_policy="priority")
    for key, priority in ((1, 5), (2, 0), (3, 5)):
        engine.submit(OWNER, make_submit(key, PROMPT, priority=priority), float(key))
    with pytest.raises(RequestError):
        engine.submit(OWNER, make_submit(4, PROMPT * 4, priority=1), 4.0)
    assert refused(engine) == {}
    engine.submit(OWNER, make_submit(5, PROMPT * 3, priority=1), 5.0)
    assert sorted(refused(engine)) == [1, 3]


def test_what_has_begun_elsewhere_is_always_taken_and_never_sent_away() -> None:
    engine = engine_of(max_waiting=1, scheduling_policy="priority", queue_timeout_s=2.0)
    engine.submit(OWNER, make_submit(1, PROMPT, prior=[8], priority=9), 0.0)
    engine.submit(OWNER, make_submit(2, PROMPT, attempt=1, priority=9), 0.0)
    with pytest.raises(RequestError):
        engine.submit(OWNER, make_submit(3, PROMPT, priority=0), 0.0)
    assert refused(engine, 100.0) == {}
    assert engine.n_waiting == 2


def test_what_waits_too_long_is_answered_and_gone() -> None:
    engine = engine_of(queue_timeout_s=2.0)
    engine.submit(OWNER, make_submit(1, PROMPT), 0.0)
    engine.submit(OWNER, make_submit(2, PROMPT), 1.5)
    assert refused(engine, 2.0) == {}
    failed = refused(engine, 2.1)
    assert list(failed) == [1]
    assert (failed[1].status, failed[1].code) == (503, "queue_timeout")
    assert engine.n_waiting == 1
    assert engine.audit() == []


@given(
    st.lists(st.tuples(st.integers(1, 300), st.floats(0, 100)), max_size=20), st.integers(1, 999)
)
def test_a_wait_is_between_a_second_and_a_minute(
    admissions: list[tuple[int, float]], n_waiting: int
) -> None:
    pace, now_s = Pace(), 0.0
    for n_requests, passed_s in admissions:
        now_s += passed_s
        pace.admitted(n_requests, 1, now_s)
    assert 1.0 <= pace.wait_s(n_waiting, now_s) <= 60.0


def test_a_wait_follows_the_pace_while_somebody_waits() -> None:
    pace = Pace()
    for second in range(4):
        pace.admitted(2, n_left=9, now_s=float(second))
    assert pace.wait_s(10, 4.0) == 5.0
    pace.admitted(9, n_left=0, now_s=4.0)
    assert pace.wait_s(100, 3604.0) == 1.0


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_choices_of_a_request_that_has_begun_are_never_sent_away(policy: str) -> None:
    engine = engine_of(max_waiting=1, scheduling_policy=policy, queue_timeout_s=2.0)
    engine.end(OWNER, [0], "abort", 0.0)
    for choice in range(3):
        submit = make_submit(1 + choice, PROMPT, request_id="three", priority=9, choice=choice)
        engine.submit(OWNER, submit, 0.0)
        engine.plan(0.0)
    assert engine.n_waiting == 2
    with pytest.raises(RequestError):
        engine.submit(OWNER, make_submit(5, PROMPT), 0.0)
    assert refused(engine, 100.0) == {}

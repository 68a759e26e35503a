"""An interrupt may land between any two lines of the engine; `fail_all` mends what it leaves."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from scheduler_helpers import OWNER, Driver, expected_answer, make_submit

from pagemesh.scheduler_svc import lifecycle

PROMPT = [3, 4, 5, 6, 7]
ROOM = str(Path(lifecycle.__file__).parent)


@contextmanager
def interrupt_before_line(n: int) -> Iterator[None]:
    """KeyboardInterrupt before the `n`-th line, from 0, that the scheduler's own code runs."""
    left = n

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(ROOM):
            return None
        if event == "line":
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(outer)


def submit_two_choices(driver: Driver) -> None:
    for choice in range(2):
        fields = {"request_id": "r", "group": "g", "choice": choice, "max_tokens": 1}
        driver.submit(make_submit(choice, PROMPT, **fields))


def end_all(driver: Driver) -> None:
    driver.engine.end(OWNER, [0, 1], "abort", 0.0)


def assert_starts_over(driver: Driver) -> None:
    engine = driver.engine
    engine.fail_all("interrupted")
    assert engine.idle
    assert engine.lost() == {}
    assert not any(client.tallies or client.leaders for client in engine._clients.values())
    again = driver.submit(make_submit(9, PROMPT))
    driver.run()
    assert again.ids == expected_answer(PROMPT, 8)
    assert engine.audit() == []
    assert engine.stats().kv_usage == 0.0


def interrupted(driver: Driver, call: Any, n: int) -> bool:
    try:
        with interrupt_before_line(n):
            call(driver)
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.parametrize("call", [submit_two_choices, Driver.plan, Driver.land, end_all])
def test_an_interrupt_at_any_line_leaves_nothing_behind(call: Any) -> None:
    n = 0
    while True:
        driver = Driver()
        if call is not submit_two_choices:
            submit_two_choices(driver)
        if call in (Driver.land, end_all):
            driver.plan()
        if not interrupted(driver, call, n):
            break
        assert_starts_over(driver)
        n += 1
    assert n > 20


def test_an_exception_while_the_failed_are_counted_leaves_new_books(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver()
    submit_two_choices(driver)
    driver.submit(make_submit(5, PROMPT), owner="tokenizer-2")
    driver.plan()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(driver.engine._lifecycle, "count_end", interrupt)
    with pytest.raises(KeyboardInterrupt):
        driver.engine.fail_all("interrupted")
    assert_starts_over(driver)

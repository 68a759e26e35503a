"""What the scheduler's log says of requests, and what clients are not told."""

from __future__ import annotations

import pytest
from scheduler_helpers import OWNER, Driver, make_card, make_submit
from structlog.typing import EventDict
from worker_model import EPOCH

from pagemesh.scheduler_svc import notices
from pagemesh.scheduler_svc.engine import Engine
from pagemesh.scheduler_svc.tally import Tally
from pagemesh.shared.engine_messages import StepResult

PROMPT = [3, 4, 5, 6, 7, 8]


class Reporting(Driver):
    """A driver whose engine reports the requests that end."""

    def __init__(self) -> None:
        super().__init__()
        self.tallies: list[Tally] = []
        self.engine = Engine(
            "engine",
            self.card,
            self.capacity,
            self.settings,
            epoch=EPOCH,
            prefix_caching=True,
            report_ended=self.tallies.append,
        )


def test_a_request_is_logged_once_when_its_last_choice_ends(log_lines: list[EventDict]) -> None:
    driver = Reporting()
    for key, max_tokens in enumerate((2, 5, 9)):
        choice = make_submit(key, PROMPT, request_id="r", max_tokens=max_tokens, choice=key)
        driver.submit(choice._replace(group="r"))
    driver.run()
    [tally] = driver.tallies
    notices.request_ended("worker-1", tally)
    assert log_lines == [
        {
            "event": "request_ended",
            "log_level": "info",
            "request_id": "r",
            "engine": "worker-1",
            "finish_reason": "length",
            "choices": 3,
            "prompt_tokens": 18,
            "generated_tokens": 16,
            "cached_tokens": tally.cached_tokens,
            "preemptions": 0,
        }
    ]
    assert 0 <= tally.cached_tokens <= 12


@pytest.mark.parametrize("way", ["abort", "drop", "failure"])
def test_every_end_is_reported(way: str) -> None:
    driver = Reporting()
    for key in (1, 2):
        driver.submit(make_submit(key, PROMPT))
    driver.plan()
    match way:
        case "abort":
            driver.engine.end(OWNER, [1, 2], "abort", 0.0)
        case "drop":
            driver.engine.drop_owner(OWNER)
        case _:
            driver.engine.fail_all("the engine failed")
    assert [tally.request_id for tally in driver.tallies] == ["request-1", "request-2"]
    reason = "error" if way == "failure" else "abort"
    assert {tuple(tally.finish_reasons) for tally in driver.tallies} == {(reason,)}


def test_the_workers_words_are_logged_and_not_answered(log_lines: list[EventDict]) -> None:
    driver = Driver()
    for key in (1, 2):
        driver.submit(make_submit(key, PROMPT))
    driver.plan()
    result = driver.pending.pop()
    assert isinstance(result, StepResult)
    secret = "ValueError: /home/ada/model"
    frames = driver.engine.apply(result._replace(failed=[(0, secret), (1, secret)]), 0.0)
    assert [error.code for _, error in frames[OWNER].failed] == ["step_failed"] * 2
    assert "ada" not in str(frames)
    [line] = [line for line in log_lines if line["event"] == "rows_failed"]
    assert line["requests"] == ["request-1", "request-2"]
    assert line["reasons"] == [secret]


def test_the_worker_is_told_the_names_of_requests() -> None:
    driver = Driver(card=make_card())
    driver.submit(make_submit(1, PROMPT, request_id="chatcmpl-1"))
    assert [row.request_id for row in driver.step().new] == ["chatcmpl-1"]

"""Tasks of a traced runner, on steps whose device answers at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from parts.step_report import report_lines
from parts.traced_runner import Failed, PlainSteps, Task, TracedRunner

from pagemesh.shared.engine_messages import NewRow, Step, StepResult


class Landed:
    ready = True

    def wait(self) -> None: ...

    def result(self) -> StepResult:
        return StepResult(1, 1, b"")


class InstantRunner:
    """What a TracedRunner asks of a Runner."""

    card = capacity = _executor = None
    live_rows = 0

    def __init__(self) -> None:
        self.launched: list[int] = []

    def launch(self, step: Step) -> Any:
        self.launched.append(step.step)
        return Landed()


class Steps:
    """Launches steps one after the other through a traced runner."""

    def __init__(self, folder: Path) -> None:
        self.inner = InstantRunner()
        self.outcomes: dict[Task, Any] = {}
        self.runner = TracedRunner(self.inner, self.outcomes.__setitem__, folder)  # type: ignore[arg-type]
        self._last = 0

    def run(self, n: int, rows: int, *, new: tuple[NewRow, ...] = (), more_tokens: int = 0) -> None:
        for _ in range(n):
            self._last += 1
            step = Step(1, self._last, self._last - 1, rows, rows + more_tokens, new=list(new))
            self.runner.launch(step).result()


@pytest.fixture
def steps(tmp_path: Path) -> Steps:
    return Steps(tmp_path)


def test_steps_of_that_many_rows_are_timed_once_they_are_steady(steps: Steps) -> None:
    task = Task(4, "plain", 5)
    steps.runner.begin(task)
    steps.run(40, rows=3)
    steps.run(16 + 5 + 1, rows=4)
    assert steps.outcomes == {}
    steps.run(1, rows=4)
    outcome = steps.outcomes[task]
    assert isinstance(outcome, PlainSteps)
    assert (outcome.rows, outcome.steps, outcome.graph_ms) == (4, 5, None)
    assert 0 < outcome.launch_ms <= outcome.mean_ms
    assert steps.inner.launched == list(range(1, 64))


@pytest.mark.parametrize(
    "other",
    [{"more_tokens": 1}, {"new": (NewRow(0, b"", 1, 0, None, b"", 0),)}],  # type: ignore[arg-type]
)
def test_other_steps_between_start_the_count_again(steps: Steps, other: dict[str, Any]) -> None:
    steps.runner.begin(Task(4, "plain", 5))
    steps.run(20, rows=4)
    steps.run(1, rows=4, **other)
    steps.run(20, rows=4)
    assert steps.outcomes == {}


def test_a_trace_that_cannot_be_split_stays_and_is_named(steps: Steps, tmp_path: Path) -> None:
    """As on a machine without a GPU, whose traces hold no kernels."""
    task = Task(2, "profile", 4)
    steps.runner.begin(task)
    steps.run(30, rows=2)
    outcome = steps.outcomes[task]
    assert isinstance(outcome, Failed)
    assert outcome.reason.startswith("TooShort")
    assert Path(outcome.trace).parent == tmp_path
    assert Path(outcome.trace).stat().st_size > 0
    assert list(report_lines(steps.outcomes))[-1].startswith("profile-2: TooShort")


def test_a_profile_that_loses_its_rows_is_begun_again(steps: Steps) -> None:
    task = Task(2, "profile", 4)
    steps.runner.begin(task)
    steps.run(18, rows=2)
    steps.run(1, rows=1)
    assert steps.outcomes == {}
    steps.run(22, rows=2)
    assert list(steps.outcomes) == [task]


def test_no_task_no_outcome(steps: Steps) -> None:
    steps.run(50, rows=1)
    assert steps.outcomes == {}

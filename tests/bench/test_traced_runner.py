"""Tasks of a traced runner, on steps whose device answers at once, or late."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from known_trace import BUSY_MS, trace
from parts.step_notes import Failed, PlainSteps, Task
from parts.step_report import report_lines
from parts.step_trace import Split
from parts.traced_runner import TracedRunner

from pagemesh.shared.engine_messages import NewRow, Step, StepResult
from pagemesh.shared.sampling import SamplingParams

NEW = NewRow(0, b"", 1, 0, SamplingParams(), b"", 0)
CONTEXT_TOKENS = 30
STEADY = 16


class Landed:
    ready = True

    def wait(self) -> None: ...

    def result(self) -> StepResult:
        return StepResult(1, 1, b"")


class Books:
    """What a TracedRunner reads of a Batch: all rows know as many tokens."""

    live_rows = 1
    computed = np.array([CONTEXT_TOKENS, 0])
    _live = np.array([True, False])


class InstantRunner:
    """What a TracedRunner asks of a Runner."""

    card = capacity = _executor = None
    live_rows = 0

    def __init__(self) -> None:
        self.launched: list[int] = []
        self._batch = Books()

    def launch(self, step: Step) -> Any:
        self.launched.append(step.step)
        return Landed()


class KnownProfile:
    """Of steps that everything is known of. Tells when it runs."""

    running = 0
    n_started = 0

    def start(self) -> KnownProfile:
        self.running += 1
        self.n_started += 1
        return self

    def stop(self) -> None:
        self.running -= 1

    def export_chrome_trace(self, path: str) -> None:
        events = json.dumps({"traceEvents": trace(10)}).encode()
        Path(path).write_bytes(gzip.compress(events))


class Steps:
    """Launches steps one after the other through a traced runner. Results land at once unless they
    are `held` back."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.inner = InstantRunner()
        self.outcomes: dict[Task, Any] = {}
        self.runner = TracedRunner(self.inner, self.outcomes.__setitem__, folder, **options)  # type: ignore[arg-type]
        self._last = 0

    def begin(self, task: Task, from_tokens: int = 0) -> None:
        """With the prompts of all its streams."""
        self.runner.begin(task, from_tokens)
        self.run(1, rows=task.rows, new=task.rows)

    def run(
        self, n: int, rows: int, *, new: int = 0, more_tokens: int = 0, held: bool = False
    ) -> list[Any]:
        landings = []
        for _ in range(n):
            self._last += 1
            step = Step(1, self._last, self._last - 1, rows, rows + more_tokens, new=[NEW] * new)
            self.runner.arrive(step.step)
            landings.append(self.runner.launch(step))
            if not held:
                landings.pop().result()
        return landings


@pytest.fixture
def steps(tmp_path: Path) -> Steps:
    return Steps(tmp_path)


def test_steps_of_that_many_rows_are_timed_once_they_are_steady(steps: Steps) -> None:
    task = Task(4, "plain", 5)
    steps.begin(task)
    steps.run(40, rows=3)
    steps.run(STEADY + 1 + 5, rows=4)
    assert steps.outcomes == {}
    steps.run(1, rows=4)
    outcome = steps.outcomes[task]
    assert isinstance(outcome, PlainSteps)
    assert (outcome.rows, outcome.steps, outcome.others) == (4, 5, 0)
    assert (outcome.context_tokens, outcome.graph_ms) == (CONTEXT_TOKENS, None)
    assert 0 < outcome.launch_ms <= outcome.mean_ms
    assert outcome.frames.late_share == 1  # nothing runs ahead here
    assert steps.inner.launched == list(range(1, 65))
    assert steps.runner.n_rows == 4 + 40 * 3 + 23 * 4


def test_streams_that_have_not_begun_are_waited_for(steps: Steps) -> None:
    steps.runner.begin(Task(4, "plain", 5))
    steps.run(60, rows=4)
    assert steps.outcomes == {}
    assert steps.runner.so_far().startswith("0 streams began; 60 steps decoded 4 to 4 rows")


def test_contexts_that_are_too_short_are_waited_for(steps: Steps) -> None:
    steps.begin(Task(4, "plain", 5), from_tokens=CONTEXT_TOKENS + 1)
    steps.run(60, rows=4)
    assert steps.outcomes == {}
    steps.inner._batch.computed = np.array([CONTEXT_TOKENS + 1, 0])
    steps.run(7, rows=4)
    assert len(steps.outcomes) == 1


@pytest.mark.parametrize("other", [{"more_tokens": 1}, {"new": 1}, {"rows": 3}])
def test_other_steps_between_are_counted_apart(steps: Steps, other: dict[str, int]) -> None:
    task = Task(4, "plain", 5)
    steps.begin(task)
    steps.run(STEADY + 1 + 3, rows=4)
    steps.run(1, **{"rows": 4, **other})
    steps.run(1 + 2, rows=4)
    assert steps.outcomes == {}
    steps.run(1, rows=4)
    assert (steps.outcomes[task].steps, steps.outcomes[task].others) == (5, 2)


def test_results_that_are_late_are_waited_for(steps: Steps) -> None:
    task = Task(4, "plain", 5)
    steps.begin(task)
    steps.run(STEADY + 1 + 3, rows=4)
    landings = steps.run(4, rows=4, held=True)
    assert steps.outcomes == {}
    for landing in landings:
        landing.result()
    steps.run(1, rows=4)
    assert steps.outcomes[task].steps == 5
    assert steps.outcomes[task].frames.late_share == pytest.approx(4 / 5)


def test_the_profiler_begins_with_a_steady_batch(tmp_path: Path) -> None:
    known = KnownProfile()
    steps = Steps(tmp_path, start_profile=known.start)
    task = Task(4, "profile", 5)
    steps.begin(task)
    steps.run(30, rows=3)
    steps.run(STEADY, rows=4)
    assert known.n_started == 0
    steps.run(6, rows=4)
    assert (known.running, steps.outcomes) == (1, {})
    steps.run(1, rows=4)
    outcome = steps.outcomes[task]
    assert isinstance(outcome, Split)
    assert (outcome.busy_ms, outcome.context_tokens) == (pytest.approx(BUSY_MS), CONTEXT_TOKENS)
    assert (known.running, known.n_started, list(tmp_path.iterdir())) == (0, 1, [])


def test_a_profile_with_other_steps_is_begun_again(tmp_path: Path) -> None:
    known = KnownProfile()
    steps = Steps(tmp_path, start_profile=known.start, keep=True)
    task = Task(4, "profile", 5)
    steps.begin(task)
    steps.run(STEADY + 3, rows=4)
    steps.run(1, rows=4, more_tokens=9)
    assert (known.running, known.n_started) == (0, 1)
    steps.run(STEADY + 1 + 5, rows=4)
    assert steps.outcomes == {}
    steps.run(1, rows=4)
    assert (known.running, known.n_started) == (0, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["profile-4.json.gz"]


def test_the_next_task_ends_one_that_waits_in_vain(tmp_path: Path) -> None:
    known = KnownProfile()
    steps = Steps(tmp_path, start_profile=known.start)
    steps.begin(Task(4, "profile", 50))
    steps.run(STEADY + 3, rows=4)
    task = Task(2, "plain", 5)
    steps.begin(task)
    assert known.running == 0
    steps.run(STEADY + 1 + 5 + 1, rows=2)
    assert list(steps.outcomes) == [task]


def test_a_trace_that_cannot_be_split_stays_and_is_named(steps: Steps, tmp_path: Path) -> None:
    """As on a machine without a GPU, whose traces hold no kernels."""
    task = Task(2, "profile", 4)
    steps.begin(task)
    steps.run(30, rows=2)
    outcome = steps.outcomes[task]
    assert isinstance(outcome, Failed)
    assert outcome.reason.startswith("TooShort")
    assert Path(outcome.trace).parent == tmp_path
    assert Path(outcome.trace).stat().st_size > 0
    assert list(report_lines(steps.outcomes))[-1].startswith("profile-2: TooShort")


def test_no_task_no_outcome(steps: Steps) -> None:
    steps.run(50, rows=1)
    assert steps.outcomes == {}
    assert steps.runner.so_far() == "no step came"


def test_the_report_tells_idle_and_lateness(tmp_path: Path) -> None:
    known = KnownProfile()
    steps = Steps(tmp_path, start_profile=known.start)
    for task in (Task(4, "plain", 5), Task(4, "profile", 5)):
        steps.begin(task)
        steps.run(STEADY + 1 + 5 + 1, rows=4)
    plain = steps.outcomes[Task(4, "plain", 5)]
    plain.mean_ms = 2 * BUSY_MS
    report = "\n".join(report_lines(steps.outcomes))
    assert (
        "4 rows, 4.0 on average, from context 30 on, 0 other steps in between; idle 50.0%" in report
    )
    assert "4 rows, order of a step after the landing of the one before: 100.0% of them" in report

"""A worker's runner under observation: plain timing of its decode steps, and torch's profiler."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Final, Literal

import msgspec
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from pagemesh.shared.engine_messages import Step, StepResult
from pagemesh.worker_svc.landing import Landing
from pagemesh.worker_svc.runner import Runner
from parts.graph_clock import alone_ms, replayed_graphs
from parts.step_trace import Split, TooShort, annotation_of, split_steps

_WARM_UP_STEPS: Final = 16
_MS_PER_NS: Final = 1e-6


class Task(msgspec.Struct, frozen=True):
    """To watch `steps` decode steps in a row, each of exactly `rows` rows."""

    rows: int
    kind: Literal["plain", "profile"]
    steps: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.rows}"


class PlainSteps(msgspec.Struct, tag=True):
    """Milliseconds a step without a profiler. `mean_ms` is the time from one result to the next.
    The launching thread's time is that inside `Runner.launch`, its CPU time the part in which it
    ran; the landing thread's CPU time is everything that it did from one result to the next, which
    offline is planning and taking in results. `graph_ms` is the time of the last step's CUDA graph
    alone, launched again and again so that the device always has another one."""

    rows: int
    steps: int
    mean_ms: float
    median_ms: float
    p99_ms: float
    launch_ms: float
    launch_cpu_ms: float
    landing_thread_cpu_ms: float
    graph_ms: float | None
    services_cpu_ms: dict[str, float] = {}
    """Of a mesh: CPU time of every service for each token of a request, prefill included."""


class Failed(msgspec.Struct, tag=True):
    """Why there is no outcome, and the trace to look into."""

    reason: str
    trace: str


Outcome = PlainSteps | Split | Failed


class Note(msgspec.Struct):
    """One step: seconds of `time.perf_counter`, nanoseconds of CPU time of a thread."""

    launch_s: float = 0.0
    launch_cpu_ns: int = 0
    landed_s: float = 0.0
    landing_cpu_ns: int = 0


class NotedLanding:
    """A Landing that writes down when its result was there."""

    def __init__(self, landing: Landing, note: Note) -> None:
        self._landing = landing
        self._note = note

    @property
    def ready(self) -> bool:
        return self._landing.ready

    def wait(self) -> None:
        self._landing.wait()

    def result(self) -> StepResult:
        result = self._landing.result()
        self._note.landing_cpu_ns = time.thread_time_ns()
        self._note.landed_s = time.perf_counter()
        return result


class TracedRunner:
    """Stands in for a Runner and works on the task it was given last, once steps come that fit.
    Steps of warm-up come before those that count. `report` is called in the launching thread.
    Traces lie in `folder` while they are read, and stay there if they cannot be, or if `keep`."""

    def __init__(
        self,
        runner: Runner,
        report: Callable[[Task, Outcome], None],
        folder: Path,
        *,
        keep: bool = False,
    ) -> None:
        self.card = runner.card
        self.capacity = runner.capacity
        self._runner = runner
        self._report = report
        self._folder = folder
        self._keep = keep
        self._begun: Task | None = None
        self._task: Task | None = None
        self._notes: list[Note] = []
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._trace: profile | None = None

    @property
    def live_rows(self) -> int:
        return self._runner.live_rows

    def reset(self) -> None:
        self._runner.reset()

    def execute(self, step: Step) -> StepResult:
        return self._runner.execute(step)

    def begin(self, task: Task) -> None:
        """From any thread. A task that is still at work is given up."""
        self._begun = task

    def launch(self, step: Step) -> NotedLanding:
        self._take_task()
        task = self._task
        if task is None or not _decodes(step, task.rows):
            self._start_over()
            return NotedLanding(self._runner.launch(step), Note())
        note = Note()
        self._notes.append(note)
        if task.kind == "profile" and len(self._notes) == _WARM_UP_STEPS:
            self._trace = _started_profile()
        if task.kind == "plain" and len(self._notes) == _WARM_UP_STEPS + task.steps + 1:
            with replayed_graphs() as self._graphs:
                return NotedLanding(self._launch(step, note), note)
        return NotedLanding(self._launch(step, note), note)

    def _launch(self, step: Step, note: Note) -> Landing:
        begun_s, begun_ns = time.perf_counter(), time.thread_time_ns()
        with record_function(annotation_of(step.step)) if self._trace else nullcontext():
            landing = self._runner.launch(step)
        note.launch_cpu_ns = time.thread_time_ns() - begun_ns
        note.launch_s = time.perf_counter() - begun_s
        return landing

    def _take_task(self) -> None:
        """Finish the task at hand if its steps are there; take over another."""
        outcome = None if self._task is None else self._outcome(self._task)
        if self._task is not None and outcome is not None:
            task, self._task = self._task, None
            self._report(task, outcome)
        if self._begun is not None:
            self._start_over()
            self._task, self._begun = self._begun, None

    def _outcome(self, task: Task) -> Outcome | None:
        counted = self._notes[_WARM_UP_STEPS:]
        if len(counted) <= task.steps:
            return None
        if task.kind == "plain":
            if not counted[task.steps].landed_s:
                return None
            return _plain(task.rows, counted[: task.steps + 1], self._graph_ms())
        assert self._trace is not None
        trace, self._trace = self._trace, None
        return self._split(trace, self._folder / f"{task.name}.json.gz")

    def _start_over(self) -> None:
        """What came so far is no run of steps."""
        self._notes.clear()
        self._graphs = []
        if self._trace is not None:
            self._trace.stop()
            self._trace = None

    def _graph_ms(self) -> float | None:
        # A graph moves its rows on by a token. What it writes behind them the steps write again.
        rows: Tensor | None = getattr(self._runner._executor, "_rows", None)
        return None if rows is None else alone_ms(self._graphs, rows)

    def _split(self, trace: profile, path: Path) -> Split | Failed:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        trace.stop()
        trace.export_chrome_trace(str(path))
        try:
            split = split_steps(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
        except (TooShort, ValueError, LookupError) as error:
            return Failed(f"{type(error).__name__}: {error}", str(path))
        if not self._keep:
            path.unlink()
        return split


def _decodes(step: Step, rows: int) -> bool:
    return step.n_rows == step.n_tokens == rows and not step.new


def _started_profile() -> profile:
    """Of all CUDA work, and of what this thread does."""
    # Otherwise a second profile of a process with CUDA graphs may crash.
    os.environ.update(TEARDOWN_CUPTI="0", DISABLE_CUPTI_LAZY_REINIT="1")
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    trace = profile(activities=activities)
    trace.start()
    return trace


def _plain(rows: int, notes: list[Note], graph_ms: float | None) -> PlainSteps:
    """From the landing of the first note to that of the last."""
    n_steps, counted = len(notes) - 1, notes[1:]
    landed_s = [note.landed_s for note in notes]
    steps_ms = [(b - a) * 1e3 for a, b in pairwise(landed_s)]
    landing_ns = notes[-1].landing_cpu_ns - notes[0].landing_cpu_ns
    return PlainSteps(
        rows=rows,
        steps=n_steps,
        mean_ms=mean(steps_ms),
        median_ms=median(steps_ms),
        p99_ms=quantiles(steps_ms, n=100)[98],
        launch_ms=mean(note.launch_s for note in counted) * 1e3,
        launch_cpu_ms=mean(note.launch_cpu_ns for note in counted) * _MS_PER_NS,
        landing_thread_cpu_ms=landing_ns / n_steps * _MS_PER_NS,
        graph_ms=graph_ms,
    )

"""A worker's runner under observation: plain timing of its decode steps, and torch's profiler."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from pagemesh.shared.engine_messages import Step, StepResult
from pagemesh.shared.ledger import Ledger
from pagemesh.worker_svc.landing import Landing
from pagemesh.worker_svc.pages import PageContents
from pagemesh.worker_svc.runner import Runner
from parts.graph_clock import alone_ms, replayed_graphs
from parts.steadiness import Steadiness
from parts.step_notes import Failed, Note, Outcome, PlainSteps, Task, plain_steps
from parts.step_trace import Split, TooShort, annotation_of, split_steps

Report = Callable[[Task, Outcome], None]


class Profile(Protocol):
    """What is used of torch's profile, which runs already."""

    def stop(self) -> None: ...

    def export_chrome_trace(self, path: str) -> None: ...


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


class _Watch:
    """A task at work. `notes` are of steps in a row: of one before those that count, and of these
    with what came in between. `graphs` are those of the step launched last, once one is wanted."""

    def __init__(self, task: Task, from_tokens: int) -> None:
        self.task = task
        self.from_tokens = from_tokens
        self.steadiness = Steadiness(task.rows)
        self.context_tokens = 0.0
        self.notes: list[Note] = []
        self.n_counted = 0
        self.graphs: list[torch.cuda.CUDAGraph] | None = None
        self.trace: Profile | None = None

    @property
    def may_begin(self) -> bool:
        return self.steadiness.is_steady and self.context_tokens >= self.from_tokens

    @property
    def has_all(self) -> bool:
        """Whether every step that counts was launched."""
        return self.n_counted == self.task.steps

    def add(self, note: Note) -> None:
        self.n_counted += bool(self.notes) and self.notes[-1].fits and note.fits
        self.notes.append(note)

    def start_over(self) -> None:
        trace, self.trace = self.trace, None
        if trace is not None:
            trace.stop()
        self.notes.clear()
        self.n_counted = 0


class TracedRunner:
    """Stands in for a Runner and works on the task it was given last, once the batch is steady.

    A plain task counts steps with others in between; the profiler begins again when others come.
    `report` is called in the launching thread. Traces lie in `folder` while they are read, and stay
    there if they cannot be, or if `keep`.
    """

    def __init__(
        self,
        runner: Runner,
        report: Report,
        folder: Path,
        *,
        keep: bool = False,
        start_profile: Callable[[], Profile] | None = None,
    ) -> None:
        self.card = runner.card
        self.capacity = runner.capacity
        self.n_rows = 0
        """Of all steps until now."""
        self._runner = runner
        self._report = report
        self._folder = folder
        self._keep = keep
        self._start_profile = start_profile or _started_profile
        self._begun: deque[_Watch] = deque(maxlen=1)
        self._watch: _Watch | None = None
        self._arrived_s: dict[int, float] = {}

    @property
    def live_rows(self) -> int:
        return self._runner.live_rows

    @property
    def ledger(self) -> Ledger:
        return self._runner.ledger

    @property
    def pages(self) -> PageContents:
        return self._runner.pages

    def reset(self) -> None:
        self._runner.reset()

    def execute(self, step: Step) -> StepResult:
        return self._runner.execute(step)

    def begin(self, task: Task, from_tokens: int = 0) -> None:
        """From any thread: to count steps once the mean context is that long. A task that is still
        at work is given up."""
        self._begun.append(_Watch(task, from_tokens))

    def so_far(self) -> str:
        """From any thread: what has come of the task that was begun last."""
        watch = self._watch
        if watch is None or self._begun:
            return "no step came"
        context = f"the mean context is {watch.context_tokens:.0f} tokens of {watch.from_tokens}"
        return f"{watch.steadiness.summary()}; {context}; {watch.n_counted} were counted"

    def arrive(self, step: int) -> None:
        """From any thread: the order of this step is there, though perhaps not its turn."""
        self._arrived_s[step] = time.perf_counter()

    def launch(self, step: Step) -> NotedLanding:
        self._take_task()
        begun_s = time.perf_counter()
        note = Note(step.n_rows, arrived_s=self._arrived_s.pop(step.step, begun_s))
        watch = self._watch
        if watch is not None:
            self._look(watch, step, note)
        landing = NotedLanding(self._launch(watch, step, note), note)
        self.n_rows += step.n_rows
        return landing

    def _look(self, watch: _Watch, step: Step, note: Note) -> None:
        """Whether the step is to be counted, and what is to be begun with it."""
        note.fits = watch.steadiness.fits(step)
        if watch.has_all:
            return
        profiles = watch.task.kind == "profile"
        if profiles and not note.fits:
            watch.start_over()
        if not watch.notes:
            watch.context_tokens = self._context_tokens()
            if not watch.may_begin:
                return
            if profiles:
                watch.trace = self._start_profile()
        watch.add(note)

    def _launch(self, watch: _Watch | None, step: Step, note: Note) -> Landing:
        traced = watch is not None and watch.trace is not None
        begun_s, begun_ns = time.perf_counter(), time.thread_time_ns()
        with record_function(annotation_of(step.step)) if traced else nullcontext():
            landing = self._noting_graphs(watch, step, note)
        note.launch_cpu_ns = time.thread_time_ns() - begun_ns
        note.launched_s = time.perf_counter()
        note.launch_s = note.launched_s - begun_s
        return landing

    def _noting_graphs(self, watch: _Watch | None, step: Step, note: Note) -> Landing:
        """Of a step like those that were counted, behind these."""
        if watch is None or watch.task.kind == "profile" or not watch.has_all:
            return self._runner.launch(step)
        with replayed_graphs() as graphs:
            landing = self._runner.launch(step)
        watch.graphs = graphs if note.fits else None
        return landing

    def _take_task(self) -> None:
        """Finish the task at hand if its steps are there; take over another."""
        watch, outcome = self._watch, None
        if watch is not None and watch.has_all:
            outcome = self._split(watch) if watch.trace is not None else self._timed(watch)
        if watch is not None and outcome is not None:
            self._watch = None
            self._report(watch.task, outcome)
        if self._begun:
            if self._watch is not None:
                self._watch.start_over()
            self._watch = self._begun.popleft()

    def _timed(self, watch: _Watch) -> PlainSteps | None:
        """None until the last result is there, and graphs that this batch can launch again."""
        if watch.graphs is None or not watch.notes[-1].landed_s:
            return None
        graph_ms = self._graph_ms(watch.graphs)
        return plain_steps(watch.task.rows, watch.context_tokens, watch.notes, graph_ms)

    def _context_tokens(self) -> float:
        """Mean of the rows at hand, before the step."""
        batch = self._runner._batch
        return float(batch.computed[batch._live].mean()) if batch.live_rows else 0.0

    def _graph_ms(self, graphs: list[torch.cuda.CUDAGraph]) -> float | None:
        # A graph moves its rows on by a token. What it writes behind them the steps write again.
        rows: Tensor | None = getattr(self._runner._executor, "_rows", None)
        return None if rows is None else alone_ms(graphs, rows)

    def _split(self, watch: _Watch) -> Split | Failed:
        path = self._folder / f"{watch.task.name}.json.gz"
        assert watch.trace is not None
        trace, watch.trace = watch.trace, None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        trace.stop()
        trace.export_chrome_trace(str(path))
        try:
            split = split_steps(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
        except (TooShort, ValueError, LookupError) as error:
            return Failed(f"{type(error).__name__}: {error}", str(path))
        split.context_tokens = watch.context_tokens
        if not self._keep:
            path.unlink()
        return split


def _started_profile() -> Profile:
    """Of all CUDA work, and of what this thread does."""
    # Otherwise a second profile of a process with CUDA graphs may crash.
    os.environ.update(TEARDOWN_CUPTI="0", DISABLE_CUPTI_LAZY_REINIT="1")
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    trace = profile(activities=activities)
    trace.start()
    return trace

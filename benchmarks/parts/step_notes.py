"""What is written down of decode steps while they are watched, and the figures made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median, quantiles
from typing import Final, Literal, NamedTuple

import msgspec

from parts.step_trace import Split

_MS: Final = 1e3
_MS_PER_NS: Final = 1e-6


class Task(msgspec.Struct, frozen=True):
    """To watch `steps` decode steps of `rows` rows: timed as they are, or under the profiler."""

    rows: int
    kind: Literal["plain", "profile"]
    steps: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.rows}"


class Lateness(msgspec.Struct):
    """How long after the landing of the step before something came, in milliseconds a step; 0 where
    it came earlier, and the device had that step or others to go on with. `late_share` of the steps
    it came after; for the others `early_ms` is the median of how much earlier it came."""

    late_share: float
    mean_ms: float
    p90_ms: float
    p99_ms: float
    longest_ms: float
    early_ms: float


class PlainSteps(msgspec.Struct, tag=True):
    """Milliseconds a step without a profiler. `mean_ms` is the time from one result to the next.
    The launching thread's time is that inside `Runner.launch`, its CPU time the part in which it
    ran; the landing thread's CPU time is everything that it did from one result to the next, which
    offline is planning and taking in results. `graph_ms` is the time of the last step's CUDA graph
    alone, launched again and again so that the device always has another one.

    `context_tokens` is the mean of the rows when the first step was launched. `others` steps came
    in between that do not count: with a chunk of a prompt, or of fewer rows, or behind such.
    `frames` tells when the order of a step came (offline: when its launch began), `launches` when
    its launch was done."""

    rows: int
    steps: int
    mean_rows: float
    others: int
    context_tokens: float
    mean_ms: float
    median_ms: float
    p99_ms: float
    launch_ms: float
    launch_cpu_ms: float
    landing_thread_cpu_ms: float
    frames: Lateness
    launches: Lateness
    graph_ms: float | None
    services_cpu_ms: dict[str, float] = {}
    """Of a mesh: CPU time of every service for each token, of steps like these."""


class Failed(msgspec.Struct, tag=True):
    """Why there is no outcome, and the trace or log to look into."""

    reason: str
    trace: str


Outcome = PlainSteps | Split | Failed


@dataclass(slots=True)
class Note:
    """One step: seconds of `time.perf_counter`, nanoseconds of CPU time of a thread. `fits`: it is
    one of those to watch."""

    n_rows: int = 0
    fits: bool = False
    arrived_s: float = 0.0
    launch_s: float = 0.0
    launch_cpu_ns: int = 0
    launched_s: float = 0.0
    landed_s: float = 0.0
    landing_cpu_ns: int = 0


class Interval(NamedTuple):
    """A step that counts, behind another that does."""

    before: Note
    step: Note

    @property
    def ms(self) -> float:
        return (self.step.landed_s - self.before.landed_s) * _MS

    @property
    def landing_cpu_ns(self) -> int:
        return self.step.landing_cpu_ns - self.before.landing_cpu_ns


def intervals(notes: Sequence[Note]) -> list[Interval]:
    """Of notes of steps in a row: a step that follows one which does not fit is not counted, since
    its time depends on that."""
    return [Interval(a, b) for a, b in pairwise(notes) if a.fits and b.fits]


def plain_steps(
    rows: int, context_tokens: float, notes: Sequence[Note], graph_ms: float | None
) -> PlainSteps:
    """Of `notes` of steps in a row, which all have landed and of which three or more count."""
    counted = intervals(notes)
    steps, steps_ms = [one.step for one in counted], [one.ms for one in counted]
    return PlainSteps(
        rows=rows,
        steps=len(counted),
        mean_rows=mean(note.n_rows for note in steps),
        others=len(notes) - 1 - len(counted),
        context_tokens=context_tokens,
        mean_ms=mean(steps_ms),
        median_ms=median(steps_ms),
        p99_ms=_percentile(steps_ms, 99),
        launch_ms=mean(note.launch_s for note in steps) * _MS,
        launch_cpu_ms=mean(note.launch_cpu_ns for note in steps) * _MS_PER_NS,
        landing_thread_cpu_ms=mean(one.landing_cpu_ns for one in counted) * _MS_PER_NS,
        frames=lateness([one.step.arrived_s - one.before.landed_s for one in counted]),
        launches=lateness([one.step.launched_s - one.before.landed_s for one in counted]),
        graph_ms=graph_ms,
    )


def lateness(after_s: Sequence[float]) -> Lateness:
    """`after_s`: seconds after the landing of the step before, negative for what came earlier."""
    late_ms = [max(seconds, 0.0) * _MS for seconds in after_s]
    early_ms = [-seconds * _MS for seconds in after_s if seconds <= 0]
    return Lateness(
        late_share=1 - len(early_ms) / len(after_s),
        mean_ms=mean(late_ms),
        p90_ms=_percentile(late_ms, 90),
        p99_ms=_percentile(late_ms, 99),
        longest_ms=max(late_ms),
        early_ms=median(early_ms) if early_ms else 0.0,
    )


def _percentile(values: Sequence[float], percent: int) -> float:
    return quantiles(values, n=100, method="inclusive")[percent - 1]

"""A trace of torch's profiler, split by decode step: when the device was busy, with what, and what
the host did while it was not. Times within are microseconds, those of a summary as named.

Each step's launch must stand in the trace as an annotation, see `annotation_of`. A device activity
belongs to the step in whose annotation the call was made that launched it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

Event = dict[str, Any]

_PREFIX: Final = "decode step "
_DEVICE: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS: Final = ("cuda_runtime", "cuda_driver")
_HOST: Final = (*_CALLS, "cpu_op")
_WARM_UP_STEPS: Final = 3
"""Left out at the start: the device has to catch up with a host that runs ahead."""
_LARGEST: Final = 8
_MOST_CALLS: Final = 4
_US_PER_MS: Final = 1e3


class TooShort(Exception):
    """The trace holds too few steps to say anything."""


class Named(msgspec.Struct):
    """Something that happens in steps: how often, and for how long, in each."""

    name: str
    per_step: float
    us_per_step: float


class LargeGap(msgspec.Struct):
    """The device waits from the end of one activity to the start of another. `in_launch_us` of it
    the host was launching steps, `calls` says with which calls (they may nest), in µs; for the
    rest no step was there to launch, or Python kept the thread from it."""

    us: float
    before: str
    after: str
    between_steps: bool
    in_launch_us: float
    calls: dict[str, float]


class Split(msgspec.Struct, tag=True):
    """Per step, from `steps` steps in a row. `busy_ms` is the time in which the device does
    something, copies included; `kernel_ms` that in which a kernel runs. The profiler makes launches
    slower, so `wall_ms` and the gaps are longer here than they are without it. Kernels that are
    launched early, and wait for those in front of them, overlap: their sum exceeds the union.
    `context_tokens` is not in the trace: the mean of the rows when it began, if that is known."""

    steps: int
    wall_ms: float
    busy_ms: float
    kernel_ms: float
    gaps_between_steps_ms: float
    gaps_within_steps_ms: float
    idle_while_launching_ms: float
    launches: float
    kernels: list[Named]
    host_calls: list[Named]
    gaps: list[Named]
    largest_gaps: list[LargeGap]
    context_tokens: float | None = None


class Span(NamedTuple):
    start: float
    end: float

    def overlap(self, other: Span) -> float:
        return max(0.0, min(self.end, other.end) - max(self.start, other.start))


@dataclass(frozen=True, slots=True)
class Activity:
    """On the device. `step` is None for what no step launched."""

    span: Span
    name: str
    is_kernel: bool
    step: int | None


@dataclass(frozen=True, slots=True)
class Gap:
    span: Span
    before: Activity
    after: Activity

    @property
    def between_steps(self) -> bool:
        return self.before.step != self.after.step

    @property
    def name(self) -> str:
        where = "between steps" if self.between_steps else "within a step"
        return f"{where}: {self.before.name} → {self.after.name}"


def annotation_of(step: int) -> str:
    return f"{_PREFIX}{step}"


def split_steps(events: Iterable[Event]) -> Split:
    """Of the events of a trace in Chrome's format. Raises TooShort."""
    complete = [event for event in events if event.get("ph") == "X"]
    launches = _launches(complete)
    if not launches:
        raise TooShort("no step was launched")
    activities = _activities(complete, launches)
    steps, window = _window(launches, activities)
    inside = [activity for activity in activities if activity.span.overlap(window) > 0]
    gaps = list(_gaps(activities, window))
    spans = [span for _, span in launches]
    return Split(
        steps=steps,
        wall_ms=(window.end - window.start) / steps / _US_PER_MS,
        busy_ms=_union(inside, window) / steps / _US_PER_MS,
        kernel_ms=_union([a for a in inside if a.is_kernel], window) / steps / _US_PER_MS,
        gaps_between_steps_ms=_total(gap for gap in gaps if gap.between_steps) / steps,
        gaps_within_steps_ms=_total(gap for gap in gaps if not gap.between_steps) / steps,
        idle_while_launching_ms=sum(_within(spans, gap.span) for gap in gaps) / steps / _US_PER_MS,
        launches=len(inside) / steps,
        kernels=_by_name(((a.name, a.span) for a in inside), steps),
        host_calls=_by_name(_calls_within(complete, spans, window), steps),
        gaps=_by_name(((gap.name, gap.span) for gap in gaps), steps)[: 2 * _LARGEST],
        largest_gaps=_largest(gaps, spans, complete),
    )


def _launches(events: list[Event]) -> list[tuple[int, Span]]:
    """Steps and when the host launched each, in order."""
    return sorted(
        (int(event["name"].removeprefix(_PREFIX)), _span(event))
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(_PREFIX)
    )


def _activities(events: list[Event], launches: list[tuple[int, Span]]) -> list[Activity]:
    """In order of their starts."""
    called_at = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in _CALLS and "correlation" in event.get("args", {})
    }
    starts = [span.start for _, span in launches]

    def step_of(event: Event) -> int | None:
        at = called_at.get(event["args"].get("correlation"))
        if at is None or at < starts[0]:
            return None
        step, launch = launches[bisect_right(starts, at) - 1]
        return step if at <= launch.end else None

    return sorted(
        (
            Activity(_span(event), event["name"], event["cat"] == "kernel", step_of(event))
            for event in events
            if event.get("cat") in _DEVICE
        ),
        key=lambda activity: activity.span,
    )


def _window(launches: list[tuple[int, Span]], activities: list[Activity]) -> tuple[int, Span]:
    """How many steps, and from the end of the step before the first of them to the end of the
    last."""
    ends: defaultdict[int, float] = defaultdict(float)
    for activity in activities:
        if activity.is_kernel and activity.step is not None:
            ends[activity.step] = max(ends[activity.step], activity.span.end)
    steps = [step for step, _ in launches if step in ends][_WARM_UP_STEPS:]
    if len(steps) < 2:
        raise TooShort(f"{len(steps)} traced steps with kernels, {len(activities)} activities")
    return len(steps) - 1, Span(ends[steps[0]], ends[steps[-1]])


def _gaps(activities: list[Activity], window: Span) -> Iterator[Gap]:
    latest = activities[0]
    for activity in activities[1:]:
        gap = Span(max(latest.span.end, window.start), min(activity.span.start, window.end))
        if gap.end > gap.start:
            yield Gap(gap, latest, activity)
        if activity.span.end > latest.span.end:
            latest = activity


def _union(activities: list[Activity], window: Span) -> float:
    total, reached = 0.0, window.start
    for start, end in (activity.span for activity in activities):
        total += max(0.0, min(end, window.end) - max(start, reached))
        reached = max(reached, end)
    return total


def _total(gaps: Iterable[Gap]) -> float:
    """In milliseconds."""
    return sum(gap.span.end - gap.span.start for gap in gaps) / _US_PER_MS


def _by_name(spans: Iterable[tuple[str, Span]], steps: int) -> list[Named]:
    """Those that take longest first."""
    durations: defaultdict[str, list[float]] = defaultdict(list)
    for name, span in spans:
        durations[name].append(span.end - span.start)
    named = [Named(name, len(us) / steps, sum(us) / steps) for name, us in durations.items()]
    return sorted(named, key=lambda one: -one.us_per_step)


def _calls_within(
    events: list[Event], launches: list[Span], window: Span
) -> Iterator[tuple[str, Span]]:
    """CUDA calls that the host made while it launched the window's steps, roughly: the host runs a
    step or two ahead."""
    for event in events:
        if event.get("cat") in _CALLS:
            span = _span(event)
            if window.start <= span.start <= window.end and _within(launches, span) > 0:
                yield event["name"], span


def _within(launches: list[Span], span: Span) -> float:
    """How long of `span` the host was launching."""
    return sum(span.overlap(launch) for launch in launches)


def _largest(gaps: list[Gap], launches: list[Span], events: list[Event]) -> list[LargeGap]:
    largest = sorted(gaps, key=lambda gap: gap.span.start - gap.span.end)[:_LARGEST]
    host = [event for event in events if event.get("cat") in _HOST]
    return [
        LargeGap(
            us=gap.span.end - gap.span.start,
            before=gap.before.name,
            after=gap.after.name,
            between_steps=gap.between_steps,
            in_launch_us=_within(launches, gap.span),
            calls=_calls_during(gap.span, host),
        )
        for gap in largest
    ]


def _calls_during(span: Span, host: list[Event]) -> dict[str, float]:
    """The longest few, by name, in microseconds of `span`."""
    times: defaultdict[str, float] = defaultdict(float)
    for event in host:
        if (overlap := _span(event).overlap(span)) > 0:
            times[event["name"]] += overlap
    longest = sorted(times.items(), key=lambda item: -item[1])[:_MOST_CALLS]
    return {name: round(us, 1) for name, us in longest}


def _span(event: Event) -> Span:
    return Span(event["ts"], event["ts"] + event.get("dur", 0))

"""One token's way from the worker to the client, from the probes of a single stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Final, NamedTuple

from parts.probe import TOKENS_OF_WRITES, WRITES

# A token is at these places one after the other: (process, what its probe noted).
WAY: Final = (
    ("worker", "step ends"),
    ("worker", "sends StepResult"),
    ("scheduler", "has StepResult"),
    ("scheduler", "sends Tokens"),
    ("tokenizer", "has Tokens"),
    ("tokenizer", "sends Deltas"),
    ("gateway", "has Deltas"),
    ("gateway", WRITES),
    ("client", "reads"),
)
HOPS: Final = (
    "worker: compute thread to event loop",
    "link worker to scheduler",
    "scheduler: result to tokens (the next step goes out first)",
    "link scheduler to tokenizer",
    "tokenizer: tokens to text",
    "link tokenizer to gateway",
    "gateway: text to event",
    "socket gateway to client",
)
# The first tokens meet cold caches and code that runs for the first time.
WARM_UP_TOKENS: Final = 50


class Spread(NamedTuple):
    """Of times in milliseconds."""

    p50: float
    p99: float

    @classmethod
    def of(cls, times_ms: Sequence[float]) -> Spread:
        return cls(median(times_ms), quantiles(times_ms, n=100)[98])

    def __str__(self) -> str:
        return f"{self.p50:7.3f} {self.p99:7.3f}"


class Way(NamedTuple):
    """Times of one stream's tokens, warm ones only: milliseconds at each place of WAY, and when
    each step began."""

    places_ms: list[list[float]]
    begins_ms: list[float]

    def hops(self) -> dict[str, Spread]:
        pairs = zip(HOPS, self.places_ms, self.places_ms[1:], strict=False)
        return {name: Spread.of(_between(start, end)) for name, start, end in pairs}

    def whole(self) -> Spread:
        """From the end of a step to the client."""
        return Spread.of(_between(self.places_ms[0], self.places_ms[-1]))

    def pauses(self) -> Spread:
        """How long the worker waits between two steps."""
        return Spread.of(_between(self.places_ms[0], self.begins_ms[1:]))

    def added(self) -> Spread:
        """Time between two tokens at the client, less the time of the step that made the second:
        what the mesh adds to a token."""
        steps_ms = _between(self.begins_ms, self.places_ms[0])
        gaps_ms = _between(self.places_ms[-1], self.places_ms[-1][1:])
        return Spread.of(_between(steps_ms[1:], gaps_ms))

    def added_on_average(self) -> float:
        """Milliseconds a token over the whole stream: what TPOT shows."""
        arrivals_ms, ends_ms = self.places_ms[-1], self.places_ms[0]
        steps_ms = sum(_between(self.begins_ms[1:], ends_ms[1:]))
        return (arrivals_ms[-1] - arrivals_ms[0] - steps_ms) / (len(arrivals_ms) - 1)


def read_way(folder: Path, event_s: Sequence[float]) -> Way:
    """The way of one stream's tokens, from the traces of all services and the times at which the
    client had each event: one for each write of the gateway."""
    traces = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    counts = traces["gateway"][TOKENS_OF_WRITES]
    reads = [int(s * 1e9) for s, n in zip(event_s, counts, strict=True) for _ in range(n)]
    traces["client"] = {"reads": reads}
    places = [_warm_ms(traces[process][place]) for process, place in WAY]
    return Way(places, _warm_ms(traces["worker"]["step begins"]))


def _warm_ms(times_ns: Sequence[int]) -> list[float]:
    return [time_ns / 1e6 for time_ns in times_ns[WARM_UP_TOKENS:]]


def _between(starts_ms: Sequence[float], ends_ms: Sequence[float]) -> list[float]:
    return [end - start for start, end in zip(starts_ms, ends_ms, strict=False)]

"""From records to figures. Names and definitions are those of `vllm bench serve`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, quantiles
from typing import Final, NamedTuple

from pagemesh.bench.client_load import ClientLoad
from pagemesh.bench.records import Record

GOODPUT_METRICS: Final = ("ttft", "tpot", "e2el")
_MS: Final = 1e3


class Spread(NamedTuple):
    """Percentiles interpolate linearly between the two nearest values."""

    mean: float
    median: float
    p90: float
    p99: float


class FailureCount(NamedTuple):
    n_requests: int
    first_message: str


@dataclass(frozen=True, slots=True)
class Summary:
    """A run. Token counts, rates and latencies are of completed requests; times in ms.

    `latency_ms` has ttft, tpot, itl and e2el, each None when there is nothing to measure.
    `output_events` is the number of events that the output tokens came in.
    """

    duration_s: float
    completed: int
    failures: dict[str, FailureCount]
    input_tokens: int
    output_tokens: int
    output_events: int
    counted_from_events: int
    without_prompt_count: int
    short_answers: int
    resent: int
    latency_ms: dict[str, Spread | None]
    good: int | None

    @property
    def failed(self) -> int:
        return sum(failure.n_requests for failure in self.failures.values())

    def per_s(self, amount: int) -> float:
        return amount / self.duration_s if self.duration_s > 0 else 0.0


def summarize(records: list[Record], limits_ms: Mapping[str, float] | None = None) -> Summary:
    """`limits_ms` (of ttft, tpot, e2el) say which requests count as good."""
    done = [record for record in records if record.failure is None]
    good = sum(is_good(record, limits_ms) for record in done) if limits_ms else None
    return Summary(
        duration_s=_duration_s(records),
        completed=len(done),
        failures=_failures(records),
        input_tokens=sum(record.prompt_tokens or 0 for record in done),
        output_tokens=sum(record.output_tokens for record in done),
        output_events=sum(len(record.event_s) for record in done),
        counted_from_events=sum(record.counted_from == "events" for record in done),
        without_prompt_count=sum(record.prompt_tokens is None for record in done),
        short_answers=sum(record.output_tokens < record.asked_tokens for record in done),
        resent=sum(record.n_resends > 0 for record in records),
        latency_ms=_latencies_ms(done),
        good=good,
    )


def spread(values: Iterable[float]) -> Spread | None:
    ordered = sorted(values)
    if not ordered:
        return None
    if len(ordered) == 1:
        return Spread(*ordered * 4)
    cuts = quantiles(ordered, n=100, method="inclusive")
    return Spread(fmean(ordered), cuts[49], cuts[89], cuts[98])


def is_good(record: Record, limits_ms: Mapping[str, float]) -> bool:
    """Within every limit. A single token has no time per token to be late with."""
    values = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.e2el_s}
    return all(values[name] * _MS <= limit for name, limit in limits_ms.items())


def merged_load(loads: Iterable[ClientLoad]) -> ClientLoad:
    """The shares of the busiest client, and every sample of lag."""
    loads = list(loads)
    busiest = max(loads, key=lambda load: load.cpu_share + load.queued_share, default=ClientLoad())
    lag_s = [lag for load in loads for lag in load.lag_s]
    return ClientLoad(busiest.cpu_share, busiest.queued_share, lag_s)


def _duration_s(records: list[Record]) -> float:
    """From the first request sent to the last one ended."""
    if not records:
        return 0.0
    return max(record.end_s for record in records) - min(record.sent_s for record in records)


def _failures(records: list[Record]) -> dict[str, FailureCount]:
    failures = [record.failure for record in records if record.failure is not None]
    first = {failure.kind: failure.message for failure in reversed(failures)}
    counts = Counter(failure.kind for failure in failures)
    return {kind: FailureCount(count, first[kind]) for kind, count in counts.most_common()}


def _latencies_ms(done: list[Record]) -> dict[str, Spread | None]:
    return {
        "ttft": spread(record.ttft_s * _MS for record in done),
        "tpot": spread(tpot * _MS for record in done if (tpot := record.tpot_s) is not None),
        "itl": spread(gap * _MS for record in done for gap in record.itl_s),
        "e2el": spread(record.e2el_s * _MS for record in done),
    }

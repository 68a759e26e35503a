"""The engine's metrics as values, by the names that the server shows them under."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric as Family


@dataclass(frozen=True, slots=True)
class Metric:
    """`labels` as in `docs/metrics.md`. A counter's name has no `_total` here, as in vLLM."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """Only grows."""

    value: int


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    value: float


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """`buckets`: upper bound → how many values are at or under it; "+Inf" has them all."""

    count: int
    sum: float
    buckets: dict[str, int]


def metrics_of(families: Iterable[Family]) -> list[Metric]:
    """What they hold now."""
    return [metric for family in families for metric in _metrics(family)]


def _metrics(family: Family) -> Iterator[Metric]:
    if family.type == "histogram":
        yield from _histograms(family)
        return
    for sample in family.samples:
        if family.type == "counter":
            yield Counter(family.name, sample.labels, int(sample.value))
        else:
            yield Gauge(family.name, sample.labels, float(sample.value))


def _histograms(family: Family) -> Iterator[Histogram]:
    """Samples of a histogram are its buckets, their number and their sum."""
    buckets: dict[str, int] = {}
    for sample in family.samples:
        labels = dict(sample.labels)
        if sample.name.endswith("_bucket"):
            buckets[labels["le"]] = int(sample.value)
        elif sample.name.endswith("_sum"):
            yield Histogram(family.name, labels, buckets["+Inf"], float(sample.value), buckets)
            buckets = {}

"""Histograms that cost a quarter of a microsecond an observation, and travel between services.

prometheus_client's own takes a lock and looks through every bucket, which counts on a path that is
walked for each token. Each of these belongs to one event loop.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

# From the cost of a small frame to a peer that stalls.
HOP_S: Final = (
    *(0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005),
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
)


class Distribution(NamedTuple):
    """What was observed so far. `counts[i]` is of values above bound i - 1 and up to bound i; the
    last is of those above every bound. Empty counts: nothing was observed yet."""

    counts: list[int] = []
    total: float = 0.0


class Observations:
    """A distribution that grows."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, in the unit of the bounds, `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def add(self, other: Observations) -> None:
        """Count all that `other`, of the same bounds, has counted."""
        self._counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]
        self._total += other._total

    def so_far(self) -> Distribution:
        return Distribution(list(self._counts), self._total)


def add_distribution(
    family: HistogramMetricFamily,
    labels: Sequence[str],
    bounds: Sequence[float],
    distribution: Distribution,
) -> None:
    """Add the series of `labels`. Counts that do not fit the bounds, as a peer of another version
    may send them, are passed over."""
    counts = distribution.counts or [0] * (len(bounds) + 1)
    if len(counts) != len(bounds) + 1:
        return
    limits = [*map(floatToGoString, bounds), "+Inf"]
    buckets = list(zip(limits, map(float, accumulate(counts)), strict=True))
    family.add_metric(labels, buckets, distribution.total)


class Histogram(Collector):
    """One histogram of a service: a series for each set of label values, made when first asked
    for. Hold on to what `labels` returns."""

    def __init__(
        self,
        registry: CollectorRegistry,
        name: str,
        text: str,
        bounds: Sequence[float] = HOP_S,
        labels: Sequence[str] = (),
    ) -> None:
        self._name, self._text, self._bounds, self._labels = name, text, bounds, labels
        self._series: dict[tuple[str, ...], Observations] = {}
        registry.register(self)

    def labels(self, *values: str) -> Observations:
        observations = self._series.get(values)
        if observations is None:
            observations = self._series[values] = Observations(self._bounds)
        return observations

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, observations in self._series.items():
            add_distribution(family, values, self._bounds, observations.so_far())
        yield family

    def describe(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(self._name, self._text, labels=self._labels)

"""What every request was answered with, and how long that took."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pagemesh.shared.distribution import Observations, add_distribution

ANSWER_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class AnswerSeries(Collector):
    """A counter and a histogram of one observation for each answer. Methods, handlers and status
    codes are few, since none of them is a client's word."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._answers: dict[tuple[str, str, int], Observations] = {}
        registry.register(self)

    def answered(self, method: str, handler: str, status: int, elapsed_s: float) -> None:
        kind = method, handler, status
        observations = self._answers.get(kind)
        if observations is None:
            observations = self._answers[kind] = Observations(ANSWER_S)
        observations.observe(elapsed_s)

    def collect(self) -> Iterator[Metric]:
        counts, times = _families()
        by_handler: dict[tuple[str, str], Observations] = {}
        for (method, handler, status), observations in self._answers.items():
            labels = (method, handler, f"{status // 100}xx", str(status))
            counts.add_metric(labels, sum(observations.so_far().counts))
            whole = by_handler.setdefault((method, handler), Observations(ANSWER_S))
            whole.add(observations)
        for route, observations in by_handler.items():
            add_distribution(times, route, ANSWER_S, observations.so_far())
        yield from (counts, times)

    def describe(self) -> Iterator[Metric]:
        yield from _families()


def _families() -> tuple[CounterMetricFamily, HistogramMetricFamily]:
    return (
        # As vLLM counts them: by class of status. The code itself stands beside.
        CounterMetricFamily(
            "http_requests",
            "Answered requests; code 499 is a client that hung up",
            labels=("method", "handler", "status", "code"),
        ),
        HistogramMetricFamily(
            "http_request_duration_seconds",
            "From a request's head to the end of its answer",
            labels=("method", "handler"),
        ),
    )

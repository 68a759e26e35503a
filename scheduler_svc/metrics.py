"""Prometheus series of the scheduler beside those every service shows of the engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pagemesh.scheduler_svc.counters import FINISH_REASONS, EngineCounters
from pagemesh.shared.metrics import LABELS

_TOTALS: Final[dict[str, tuple[str, Callable[[EngineCounters], int]]]] = {
    "pagemesh_engine_requests_received": (
        "Choices that entered an engine; each runs, waits, or is in pagemesh_engine_requests",
        lambda counters: counters.received,
    ),
    "pagemesh_preempted_tokens": (
        "Computed tokens that preemption threw away",
        lambda counters: counters.preempted_tokens,
    ),
    "pagemesh_audit_findings": (
        "Faults that the idle audit found in the books of blocks and slots, and repaired",
        lambda counters: counters.audit_findings,
    ),
    "pagemesh_engine_failures": (
        "Times an engine gave up all its requests because its books disagreed",
        lambda counters: counters.failures,
    ),
}


class EngineView(NamedTuple):
    """One engine at the moment of a scrape."""

    model_name: str
    engine_id: str
    counters: EngineCounters
    step_age_s: float


class SchedulerCollector(Collector):
    """`ejected`: workers lost at a step that took too long."""

    def __init__(
        self, engines: Callable[[], Iterable[EngineView]], ejected: Callable[[], int]
    ) -> None:
        self._engines = engines
        self._ejected = ejected

    def collect(self) -> Iterator[Metric]:
        return self._families(list(self._engines()))

    def describe(self) -> Iterator[Metric]:
        return self._families([])

    def _families(self, engines: list[EngineView]) -> Iterator[Metric]:
        yield from engine_families(engines)
        yield CounterMetricFamily(
            "pagemesh_worker_ejections",
            "Workers lost at a step that took too long: they ended themselves or were ejected",
            value=self._ejected(),
        )


def engine_families(engines: list[EngineView]) -> Iterator[Metric]:
    """What is shown of each engine."""
    yield _finished(engines)
    yield _step_age(engines)
    for name, (text, value) in _TOTALS.items():
        family = CounterMetricFamily(name, text, labels=LABELS)
        for engine in engines:
            family.add_metric((engine.model_name, engine.engine_id), value(engine.counters))
        yield family


def _finished(engines: list[EngineView]) -> Metric:
    family = CounterMetricFamily(
        "pagemesh_engine_requests",
        "Choices of requests that ended on an engine, by reason",
        labels=(*LABELS, "finished_reason"),
    )
    for engine in engines:
        for reason in FINISH_REASONS:
            labels = (engine.model_name, engine.engine_id, reason)
            family.add_metric(labels, engine.counters.finished[reason])
    return family


def _step_age(engines: list[EngineView]) -> Metric:
    family = GaugeMetricFamily(
        "pagemesh_oldest_step_age_seconds",
        "How long the worker has been at the oldest step that is out",
        labels=LABELS,
    )
    for engine in engines:
        family.add_metric((engine.model_name, engine.engine_id), engine.step_age_s)
    return family

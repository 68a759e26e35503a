"""Prometheus series of the engines, for every service that knows some: names are an interface."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pagemesh.shared.messages import EngineStats, EngineStatus

LABELS: Final = ("model_name", "engine")


class _Series(NamedTuple):
    """One series. A counter's exposed name gains the suffix `_total`."""

    family: type[GaugeMetricFamily] | type[CounterMetricFamily]
    name: str
    help: str
    value: Callable[[EngineStats], float]


_SERIES: Final = (
    _Series(
        GaugeMetricFamily,
        "vllm:gpu_cache_usage_perc",
        "Share of the KV blocks in use, 0 to 1",
        lambda stats: stats.kv_usage,
    ),
    _Series(
        GaugeMetricFamily,
        "vllm:kv_cache_usage_perc",
        "Share of the KV blocks in use, 0 to 1",
        lambda stats: stats.kv_usage,
    ),
    _Series(
        GaugeMetricFamily,
        "vllm:num_requests_running",
        "Requests in the batch",
        lambda stats: stats.running,
    ),
    _Series(
        GaugeMetricFamily,
        "vllm:num_requests_waiting",
        "Requests waiting to be scheduled",
        lambda stats: stats.waiting,
    ),
    _Series(
        CounterMetricFamily,
        "vllm:num_preemptions",
        "Requests that lost their KV blocks to others and are computed again",
        lambda stats: stats.preemptions_total,
    ),
    _Series(
        CounterMetricFamily,
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache",
        lambda stats: stats.prefix_query_tokens_total,
    ),
    _Series(
        CounterMetricFamily,
        "vllm:prefix_cache_hits",
        "Prompt tokens found in the prefix cache",
        lambda stats: stats.prefix_hit_tokens_total,
    ),
)


class EngineCollector(Collector):
    """The engines' series at the moment of the scrape, labelled by model and engine."""

    def __init__(self, engines: Callable[[], Iterable[EngineStatus]]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        engines = list(self._engines())
        for series in _SERIES:
            family = series.family(series.name, series.help, labels=LABELS)
            for engine in engines:
                labels = (engine.card.names[0], engine.engine_id)
                family.add_metric(labels, series.value(engine.stats))
            yield family

    def describe(self) -> Iterator[Metric]:
        """Registering must not ask for engines that do not exist yet."""
        for series in _SERIES:
            yield series.family(series.name, series.help, labels=LABELS)

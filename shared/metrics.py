"""Prometheus series of the engines, for every service that knows some: names are an interface."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from pagemesh.shared.distribution import HOP_S, Distribution, add_distribution
from pagemesh.shared.messages import EngineStats, EngineStatus
from pagemesh.shared.step_stats import STEP_TOKENS, StepStats

LABELS: Final = ("model_name", "engine")
DESIRED_WORKERS: Final = "pagemesh:desired_workers"


class _Value(NamedTuple):
    """A gauge or counter. A counter's exposed name gains the suffix `_total`."""

    family: type[GaugeMetricFamily] | type[CounterMetricFamily]
    name: str
    help: str
    value: Callable[[EngineStats], float]


class _Steps(NamedTuple):
    """A histogram over the steps of an engine."""

    name: str
    help: str
    bounds: Sequence[float]
    distribution: Callable[[StepStats], Distribution]


_KV_HELP: Final = "Share of the KV blocks in use, 0 to 1"
_QUERIES_HELP: Final = "Tokens of newly admitted requests looked up in the prefix cache"
_HITS_HELP: Final = "Tokens of newly admitted requests found in the prefix cache"

# What vLLM has renamed is shown under the old and the new name: dashboards ask for either.
_VALUES: Final = (
    _Value(GaugeMetricFamily, "vllm:gpu_cache_usage_perc", _KV_HELP, lambda stats: stats.kv_usage),
    _Value(GaugeMetricFamily, "vllm:kv_cache_usage_perc", _KV_HELP, lambda stats: stats.kv_usage),
    _Value(
        GaugeMetricFamily,
        "vllm:num_requests_running",
        "Requests in the batch",
        lambda stats: stats.running,
    ),
    _Value(
        GaugeMetricFamily,
        "vllm:num_requests_waiting",
        "Requests waiting to be scheduled",
        lambda stats: stats.waiting,
    ),
    _Value(
        CounterMetricFamily,
        "vllm:num_preemptions",
        "Requests that lost their KV blocks to others and are computed again",
        lambda stats: stats.preemptions_total,
    ),
    _Value(
        CounterMetricFamily,
        "vllm:prefix_cache_queries",
        _QUERIES_HELP,
        lambda stats: stats.prefix_query_tokens_total,
    ),
    _Value(
        CounterMetricFamily,
        "vllm:prefix_cache_hits",
        _HITS_HELP,
        lambda stats: stats.prefix_hit_tokens_total,
    ),
    _Value(
        CounterMetricFamily,
        "vllm:gpu_prefix_cache_queries",
        _QUERIES_HELP,
        lambda stats: stats.prefix_query_tokens_total,
    ),
    _Value(
        CounterMetricFamily,
        "vllm:gpu_prefix_cache_hits",
        _HITS_HELP,
        lambda stats: stats.prefix_hit_tokens_total,
    ),
    _Value(
        CounterMetricFamily,
        "pagemesh_readmission_prefix_queries",
        "Tokens looked up in the prefix cache when preempted requests came back",
        lambda stats: stats.readmitted_query_tokens_total,
    ),
    _Value(
        CounterMetricFamily,
        "pagemesh_readmission_prefix_hits",
        "Tokens found in the prefix cache when preempted requests came back",
        lambda stats: stats.readmitted_hit_tokens_total,
    ),
)

_STEPS: Final = (
    _Steps(
        "vllm:iteration_tokens_total",
        "Tokens computed in a step, prompts and decodes",
        STEP_TOKENS,
        lambda steps: steps.tokens,
    ),
    _Steps("pagemesh_step_plan_seconds", "Deciding a step", HOP_S, lambda steps: steps.plan_s),
    _Steps(
        "pagemesh_step_round_trip_seconds",
        "From a step's decision to its result, both at the scheduler",
        HOP_S,
        lambda steps: steps.round_trip_s,
    ),
    _Steps(
        "pagemesh_step_worker_seconds",
        "Within the worker: the wait behind earlier steps, and the computation",
        HOP_S,
        lambda steps: steps.worker_s,
    ),
    _Steps(
        "pagemesh_step_compute_seconds",
        "Computing a step in the worker",
        HOP_S,
        lambda steps: steps.compute_s,
    ),
    _Steps(
        "pagemesh_step_link_seconds",
        "The round trip less the time within the worker: the way there and back, event loops "
        "and coding included",
        HOP_S,
        lambda steps: steps.link_s,
    ),
    _Steps(
        "pagemesh_scheduler_token_seconds",
        "From a step's result to its tokens on their way up; the next step goes out in between",
        HOP_S,
        lambda steps: steps.apply_s,
    ),
)


class DesiredWorkersCollector(Collector):
    """The figure for autoscalers, by model. `desired` gives it at the moment of the scrape."""

    def __init__(self, desired: Callable[[], Mapping[str, int]]) -> None:
        self._desired = desired

    def collect(self) -> Iterator[Metric]:
        return self._families(self._desired())

    def describe(self) -> Iterator[Metric]:
        return self._families({})

    def _families(self, desired: Mapping[str, int]) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            DESIRED_WORKERS,
            "Workers that a model needs; of several gateways the largest figure holds",
            labels=("model_name",),
        )
        for model, n_workers in desired.items():
            family.add_metric((model,), n_workers)
        yield family


class EngineCollector(Collector):
    """The engines' series at the moment of the scrape, labelled by model and engine."""

    def __init__(self, engines: Callable[[], Iterable[EngineStatus]]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        return _families(list(self._engines()))

    def describe(self) -> Iterator[Metric]:
        """Registering must not ask for engines that do not exist yet."""
        return _families([])


def _families(engines: list[EngineStatus]) -> Iterator[Metric]:
    for value in _VALUES:
        yield _family_of_values(value, engines)
    yield _waiting_by_reason(engines)
    for steps in _STEPS:
        yield _family_of_steps(steps, engines)
    yield _cache_config(engines)


def _labels(engine: EngineStatus) -> tuple[str, str]:
    return engine.card.names[0], engine.engine_id


def _family_of_values(series: _Value, engines: list[EngineStatus]) -> Metric:
    family = series.family(series.name, series.help, labels=LABELS)
    for engine in engines:
        family.add_metric(_labels(engine), series.value(engine.stats))
    return family


def _waiting_by_reason(engines: list[EngineStatus]) -> Metric:
    family = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason",
        "Requests waiting to be scheduled: for capacity, or deferred until another choice of "
        "their prompt has computed it",
        labels=(*LABELS, "reason"),
    )
    for engine in engines:
        stats = engine.stats
        capacity = stats.waiting - stats.waiting_deferred
        family.add_metric((*_labels(engine), "capacity"), capacity)
        family.add_metric((*_labels(engine), "deferred"), stats.waiting_deferred)
    return family


def _family_of_steps(series: _Steps, engines: list[EngineStatus]) -> Metric:
    family = HistogramMetricFamily(series.name, series.help, labels=LABELS)
    for engine in engines:
        distribution = series.distribution(engine.stats.steps)
        add_distribution(family, _labels(engine), series.bounds, distribution)
    return family


def _cache_config(engines: list[EngineStatus]) -> Metric:
    family = GaugeMetricFamily(
        "vllm:cache_config_info",
        "Always 1; the labels say how the KV cache of an engine is laid out",
        labels=(*LABELS, "block_size", "num_gpu_blocks", "cache_dtype"),
    )
    for engine in engines:
        card, n_blocks = engine.card, engine.capacity.num_blocks
        layout = (str(card.block_tokens), str(n_blocks), card.dtype)
        family.add_metric((*_labels(engine), *layout), 1)
    return family

"""The engines' series, as Prometheus scrapes them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pagemesh.shared.distribution import Distribution
from pagemesh.shared.messages import Capacity, EngineStats, EngineStatus, ModelCard
from pagemesh.shared.metrics import EngineCollector
from pagemesh.shared.step_stats import StepObservations

CARD = ModelCard(["tiny", "alias"], 100, 64, 16, "float32", [2], 1, "f", 0)
CAPACITY = Capacity(8, 4, 64, 128, "cpu")
GOLDEN = {
    "vllm:gpu_cache_usage_perc": 0.25,
    "vllm:kv_cache_usage_perc": 0.25,
    "vllm:num_requests_running": 3,
    "vllm:num_requests_waiting": 5,
    "vllm:num_requests_waiting_by_reason capacity": 4,
    "vllm:num_requests_waiting_by_reason deferred": 1,
    "vllm:num_preemptions_total": 7,
    "vllm:prefix_cache_queries_total": 100,
    "vllm:prefix_cache_hits_total": 48,
    "vllm:gpu_prefix_cache_queries_total": 100,
    "vllm:gpu_prefix_cache_hits_total": 48,
    "pagemesh_readmission_prefix_queries_total": 30,
    "pagemesh_readmission_prefix_hits_total": 20,
    "vllm:cache_config_info 16 8 float32": 1,
}
HISTOGRAMS = {
    "vllm:iteration_tokens_total",
    "pagemesh_step_plan_seconds",
    "pagemesh_step_round_trip_seconds",
    "pagemesh_step_worker_seconds",
    "pagemesh_step_compute_seconds",
    "pagemesh_step_link_seconds",
    "pagemesh_scheduler_token_seconds",
}
LABELS = {"model_name": "tiny", "engine": "engine-1"}


def status(stats: EngineStats, name: str = "engine-1") -> EngineStatus:
    return EngineStatus(name, CARD, CAPACITY, stats)


def scraped(engines: list[EngineStatus]) -> list[tuple[str, dict[str, str], float]]:
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: engines))
    text = generate_latest(registry).decode()
    return [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


def parts_of(name: str) -> set[str]:
    return {f"{name}_{part}" for part in ("bucket", "sum", "count")}


def test_names_and_labels_are_an_interface() -> None:
    samples = scraped([status(EngineStats(3, 5, 0.25, 7, 100, 48, 1, 30, 20))])
    assert all(labels.items() >= LABELS.items() for _, labels, _ in samples)
    parts = set().union(*map(parts_of, HISTOGRAMS))
    assert parts <= {name for name, _, _ in samples}
    shown = {}
    for name, labels, value in samples:
        if name not in parts:
            kinds = [labels[label] for label in labels if label not in LABELS]
            order = sorted(kinds, key=["16", "8", "float32"].index) if len(kinds) == 3 else kinds
            shown[" ".join([name, *order])] = value
    assert shown == GOLDEN


def test_step_times_are_shown_by_bucket() -> None:
    steps = StepObservations()
    for compute_s in (0.001, 0.003):
        steps.landed(round_trip_s=0.01, inside_s=0.004, compute_s=compute_s)
    steps.tokens.observe(8)
    values = {
        (name, labels.get("le")): value
        for name, labels, value in scraped([status(EngineStats(steps=steps.so_far()))])
    }
    assert values["pagemesh_step_compute_seconds_bucket", "0.001"] == 1
    assert values["pagemesh_step_compute_seconds_bucket", "0.005"] == 2
    assert values["pagemesh_step_compute_seconds_sum", None] == 0.004
    assert values["pagemesh_step_link_seconds_bucket", "0.005"] == 0
    assert values["pagemesh_step_link_seconds_bucket", "0.01"] == 2
    assert values["vllm:iteration_tokens_total_bucket", "8.0"] == 1
    assert values["vllm:iteration_tokens_total_count", None] == 1


def test_counts_of_other_buckets_are_not_shown() -> None:
    """A peer of another version may sort into other buckets."""
    steps = StepObservations().so_far()._replace(plan_s=Distribution([1, 2], 0.1))
    names = {name for name, _, _ in scraped([status(EngineStats(steps=steps))])}
    assert not parts_of("pagemesh_step_plan_seconds") & names
    assert parts_of("pagemesh_step_link_seconds") <= names


def test_engines_come_and_go_between_scrapes() -> None:
    engines: list[EngineStatus] = []
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: engines))
    assert b"engine-2" not in generate_latest(registry)
    engines.append(status(EngineStats(), "engine-2"))
    assert b'engine="engine-2"' in generate_latest(registry)
    engines.clear()
    assert b"engine-2" not in generate_latest(registry)


def test_two_engines_have_a_series_each() -> None:
    engines = [status(EngineStats(running=count), name) for name, count in (("a", 1), ("b", 2))]
    running = {
        labels["engine"]: value
        for name, labels, value in scraped(engines)
        if name == "vllm:num_requests_running"
    }
    assert running == {"a": 1, "b": 2}

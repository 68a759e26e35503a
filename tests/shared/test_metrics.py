"""The engines' series, as Prometheus scrapes them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pagemesh.shared.messages import Capacity, EngineStats, EngineStatus, ModelCard
from pagemesh.shared.metrics import EngineCollector

CARD = ModelCard(["tiny", "alias"], 100, 64, 16, "float32", [2], 1, "f", 0)
CAPACITY = Capacity(8, 4, 64, 128, "cpu")
GOLDEN = {
    "vllm:gpu_cache_usage_perc": 0.25,
    "vllm:kv_cache_usage_perc": 0.25,
    "vllm:num_requests_running": 3,
    "vllm:num_requests_waiting": 2,
    "vllm:num_preemptions_total": 7,
    "vllm:prefix_cache_queries_total": 100,
    "vllm:prefix_cache_hits_total": 48,
}


def scraped(engines: list[EngineStatus]) -> list[tuple[str, dict[str, str], float]]:
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: engines))
    text = generate_latest(registry).decode()
    return [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


def test_names_and_labels_are_an_interface() -> None:
    stats = EngineStats(3, 2, 0.25, 7, 100, 48)
    samples = scraped([EngineStatus("engine-1", CARD, CAPACITY, stats)])
    assert {name: value for name, _, value in samples} == GOLDEN
    assert all(labels == {"model_name": "tiny", "engine": "engine-1"} for _, labels, _ in samples)


def test_engines_come_and_go_between_scrapes() -> None:
    engines: list[EngineStatus] = []
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: engines))
    assert b"engine-2" not in generate_latest(registry)
    engines.append(EngineStatus("engine-2", CARD, CAPACITY, EngineStats()))
    assert b'engine="engine-2"' in generate_latest(registry)
    engines.clear()
    assert b"engine-2" not in generate_latest(registry)


def test_two_engines_have_a_series_each() -> None:
    engines = [
        EngineStatus(name, CARD, CAPACITY, EngineStats(running=count))
        for name, count in (("a", 1), ("b", 2))
    ]
    running = {
        labels["engine"]: value
        for name, labels, value in scraped(engines)
        if name == "vllm:num_requests_running"
    }
    assert running == {"a": 1, "b": 2}

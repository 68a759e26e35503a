"""Names and labels of the scheduler's series are an interface: dashboards are built on them."""

from __future__ import annotations

from metric_names import names_types_labels
from prometheus_client import CollectorRegistry, generate_latest

from pagemesh.scheduler_svc.counters import EngineCounters
from pagemesh.scheduler_svc.metrics import EngineView, SchedulerCollector
from pagemesh.scheduler_svc.publisher import PublishMetrics

ENGINE = {"model_name", "engine"}


def test_names_and_labels() -> None:
    registry = CollectorRegistry()
    registry.register(
        SchedulerCollector(lambda: [EngineView("tiny", "worker-1", EngineCounters(), 0.0)], int)
    )
    samples = [sample for family in registry.collect() for sample in family.samples]
    assert {sample.name: set(sample.labels) for sample in samples} == {
        "pagemesh_engine_requests_received_total": ENGINE,
        "pagemesh_engine_requests_total": ENGINE | {"finished_reason"},
        "pagemesh_oldest_step_age_seconds": ENGINE,
        "pagemesh_worker_ejections_total": set(),
        "pagemesh_preempted_tokens_total": ENGINE,
        "pagemesh_audit_findings_total": ENGINE,
        "pagemesh_engine_failures_total": ENGINE,
    }
    reasons = {s.labels["finished_reason"] for s in samples if "finished_reason" in s.labels}
    assert reasons == {"stop", "length", "abort", "error", "rejected"}


def test_names_of_publishing() -> None:
    registry = CollectorRegistry()
    PublishMetrics(registry)
    assert (
        names_types_labels(generate_latest(registry).decode())
        == """\
pagemesh_index_dropped_blocks_total counter
pagemesh_index_publish_calls_total counter
pagemesh_index_publish_failures_total counter
pagemesh_index_published_blocks_total counter
pagemesh_index_sections_walked_total counter
"""
    )

"""Names and labels of the scheduler's series are an interface: dashboards are built on them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from pagemesh.scheduler_svc.counters import EngineCounters
from pagemesh.scheduler_svc.metrics import EngineView, SchedulerCollector

ENGINE = {"model_name", "engine"}


def test_names_and_labels() -> None:
    registry = CollectorRegistry()
    registry.register(
        SchedulerCollector(lambda: [EngineView("tiny", "worker-1", EngineCounters(), 0.0)])
    )
    samples = [sample for family in registry.collect() for sample in family.samples]
    assert {sample.name: set(sample.labels) for sample in samples} == {
        "pagemesh_engine_requests_received_total": ENGINE,
        "pagemesh_engine_requests_total": ENGINE | {"finished_reason"},
        "pagemesh_oldest_step_age_seconds": ENGINE,
        "pagemesh_preempted_tokens_total": ENGINE,
        "pagemesh_audit_findings_total": ENGINE,
        "pagemesh_engine_failures_total": ENGINE,
    }
    reasons = {s.labels["finished_reason"] for s in samples if "finished_reason" in s.labels}
    assert reasons == {"stop", "length", "abort", "error"}

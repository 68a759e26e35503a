"""Names and labels of the worker's series are an interface: dashboards are built on them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from pagemesh.shared.engine_messages import Step, StepResult
from pagemesh.worker_svc.metrics import WorkerMetrics


def test_names_and_labels() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    step = Step(1, 1, 0, 0, 0)
    metrics.count(step, StepResult(1, 1, b"", nonfinite=[0], failed=[(1, "broken")]))
    samples = [sample for family in registry.collect() for sample in family.samples]
    labels = {s.name: set(s.labels) for s in samples if not s.name.endswith("_created")}
    assert labels == {
        "pagemesh_worker_step_seconds_bucket": {"le"},
        "pagemesh_worker_step_seconds_count": set(),
        "pagemesh_worker_step_seconds_sum": set(),
        "pagemesh_worker_steps_total": set(),
        "pagemesh_worker_tokens_total": set(),
        "pagemesh_worker_sampled_tokens_total": set(),
        "pagemesh_worker_bad_rows_total": {"cause"},
        "pagemesh_worker_snapshot_requests_total": set(),
        "pagemesh_worker_last_step_age_seconds": set(),
        "pagemesh_kv_pool_bytes": set(),
        "pagemesh_kv_pool_blocks": set(),
        "pagemesh_kv_pool_tokens": set(),
    }
    causes = {s.labels["cause"] for s in samples if "cause" in s.labels}
    assert causes == {"failed", "nonfinite"}

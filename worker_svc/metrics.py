"""Prometheus series of a worker."""

from __future__ import annotations

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pagemesh.shared.engine_messages import Step, StepResult
from pagemesh.shared.messages import Capacity, ModelCard
from pagemesh.worker_svc.batch import WIRE_INT
from pagemesh.worker_svc.progress import ComputeProgress

_STEP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class WorkerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._step_seconds = Histogram(
            "pagemesh_worker_step_seconds",
            "Time to compute one step",
            buckets=_STEP_BUCKETS_S,
            registry=registry,
        )
        self._steps = Counter("pagemesh_worker_steps", "Steps executed", registry=registry)
        self._tokens = Counter(
            "pagemesh_worker_tokens", "Tokens computed, prompts included", registry=registry
        )
        self._sampled = Counter(
            "pagemesh_worker_sampled_tokens", "Tokens generated", registry=registry
        )
        self._bad_rows = Counter(
            "pagemesh_worker_bad_rows",
            "Rows of steps that failed or had NaN or infinite logits",
            ["cause"],
            registry=registry,
        )
        self._snapshots = Counter(
            "pagemesh_worker_snapshot_requests",
            "Times a step did not follow the last one",
            registry=registry,
        )
        self._last_step_age_s = Gauge(
            "pagemesh_worker_last_step_age_seconds",
            "Time since a step landed, or since the start",
            registry=registry,
        )
        self._pool_bytes = Gauge("pagemesh_kv_pool_bytes", "Size of the KV pool", registry=registry)
        self._pool_blocks = Gauge(
            "pagemesh_kv_pool_blocks", "Blocks of the KV pool for requests", registry=registry
        )
        self._pool_tokens = Gauge(
            "pagemesh_kv_pool_tokens", "Tokens the KV pool can hold", registry=registry
        )

    def watch(self, progress: ComputeProgress) -> None:
        self._last_step_age_s.set_function(lambda: progress.last_step_age_s)

    def describe_pool(self, card: ModelCard, capacity: Capacity) -> None:
        blocks = capacity.num_blocks - 1
        self._pool_blocks.set(blocks)
        self._pool_tokens.set(blocks * card.block_tokens)
        self._pool_bytes.set(capacity.num_blocks * card.block_tokens * capacity.kv_bytes_per_token)

    def count(self, step: Step, result: StepResult) -> None:
        self._steps.inc()
        self._step_seconds.observe(result.elapsed_s)
        self._tokens.inc(step.n_tokens)
        self._sampled.inc(int((np.frombuffer(result.sampled, WIRE_INT) >= 0).sum()))
        for cause, rows in (("failed", result.failed), ("nonfinite", result.nonfinite)):
            if rows:
                self._bad_rows.labels(cause).inc(len(rows))

    def count_gap(self) -> None:
        self._snapshots.inc()

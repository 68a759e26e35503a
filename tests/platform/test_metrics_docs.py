"""Every series has a line in the documentation, and the documentation names no other."""

from __future__ import annotations

import re
from pathlib import Path

from metric_names import GATEWAY_GOLDEN, names_types_labels
from prometheus_client import CollectorRegistry, generate_latest

from pagemesh.scheduler_svc.metrics import SchedulerCollector
from pagemesh.scheduler_svc.publisher import PublishMetrics
from pagemesh.tokenizer_svc.lookup import LookupMetrics
from pagemesh.tokenizer_svc.metrics import TokenizerMetrics
from pagemesh.worker_svc.metrics import WorkerMetrics

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
NAME = re.compile(r"\b(?:pagemesh[_:]|vllm:|http_request)[a-z0-9_]+")


def inner_services() -> CollectorRegistry:
    registry = CollectorRegistry()
    TokenizerMetrics(registry, in_flight=int, waiting=int)
    LookupMetrics(registry)
    WorkerMetrics(registry)
    PublishMetrics(registry)
    registry.register(SchedulerCollector(list, int))
    return registry


def test_the_documentation_has_every_series_and_no_other() -> None:
    inner = names_types_labels(generate_latest(inner_services()).decode())
    lines = (GATEWAY_GOLDEN.read_text() + inner).splitlines()
    assert set(NAME.findall(DOCS.read_text())) == {line.split()[0] for line in lines}

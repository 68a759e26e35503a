"""Names and labels of the tokenizer's series are an interface: dashboards are built on them."""

from __future__ import annotations

from metric_names import names_types_labels
from prometheus_client import CollectorRegistry, generate_latest

from pagemesh.tokenizer_svc.lookup import LookupMetrics
from pagemesh.tokenizer_svc.metrics import TokenizerMetrics

GOLDEN = """\
pagemesh_index_lookup_seconds histogram
pagemesh_index_lookups_total counter result
pagemesh_placement_hit_tokens_total counter
pagemesh_placement_tokens_total counter
pagemesh_tokenizer_admit_seconds histogram
pagemesh_tokenizer_choices_resubmitted_total counter
pagemesh_tokenizer_encode_queue gauge
pagemesh_tokenizer_encode_seconds histogram
pagemesh_tokenizer_output_tokens_total counter
pagemesh_tokenizer_prompt_tokens_total counter
pagemesh_tokenizer_requests_in_flight gauge
pagemesh_tokenizer_requests_refused_total counter status
pagemesh_tokenizer_token_seconds histogram
"""


def test_names_and_labels() -> None:
    registry = CollectorRegistry()
    metrics = TokenizerMetrics(registry, in_flight=lambda: 0, waiting=lambda: 0)
    LookupMetrics(registry)
    metrics.refused.labels("400").inc()
    assert names_types_labels(generate_latest(registry).decode()) == GOLDEN

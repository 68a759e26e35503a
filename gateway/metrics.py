"""The gateway's own counters. Names are an interface."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter

from pagemesh.gateway.request_metrics import RequestMetrics

MAX_FIELD_LABELS: Final = 64
OTHER_FIELD: Final = "(other)"


class GatewayMetrics:
    """Registered once per process, on the registry of its Runtime."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = RequestMetrics(registry)
        self.http_requests = Counter(
            "http_requests",
            "Answered requests; status 499 is a client that hung up",
            ["method", "handler", "status"],
            registry=registry,
        )
        self.slow_clients = Counter(
            "pagemesh:slow_clients_aborted",
            "Streams ended because their client did not read",
            registry=registry,
        )
        self.resubmitted = Counter(
            "pagemesh:requests_resubmitted",
            "Requests sent again because their tokenizer service was lost",
            registry=registry,
        )
        self._unknown_fields = Counter(
            "pagemesh:unknown_fields",
            "Request fields that were ignored because nobody knows them",
            ["endpoint", "field"],
            registry=registry,
        )
        self._field_labels: set[str] = set()

    def unknown_field(self, endpoint: str, field: str) -> None:
        """Clients choose the names, so only the first of them become labels."""
        if field not in self._field_labels:
            plain = all(name.isidentifier() for name in field.split("."))
            if len(self._field_labels) >= MAX_FIELD_LABELS or not plain:
                field = OTHER_FIELD
            self._field_labels.add(field)
        self._unknown_fields.labels(endpoint, field).inc()

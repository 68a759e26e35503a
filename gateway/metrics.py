"""The gateway's own counters. Names are an interface."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge

from pagemesh.gateway.answer_series import AnswerSeries
from pagemesh.gateway.request_metrics import RequestMetrics
from pagemesh.shared.distribution import Histogram

MAX_FIELD_LABELS: Final = 64
# Routes come and go at run time, their series stay.
MAX_ROUTE_LABELS: Final = 1024
OTHER_FIELD: Final = "(other)"
OTHER_ROUTE: Final = ("(other)", "(other)")


class GatewayMetrics:
    """Registered once per process, on the registry of its Runtime."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = RequestMetrics()
        self.answered = AnswerSeries(registry).answered
        self.token_s = Histogram(
            registry,
            "pagemesh_gateway_token_seconds",
            "From the arrival of tokens in one turn of the event loop to their last write to a "
            "client's socket, of streams that keep up",
        ).labels()
        self.slow_clients = Counter(
            "pagemesh_slow_clients_aborted",
            "Streams ended because their client did not read",
            registry=registry,
        )
        self.resubmitted = Counter(
            "pagemesh_requests_resubmitted",
            "Requests sent again because their tokenizer service was lost",
            registry=registry,
        )
        self.background_responses = Gauge(
            "pagemesh_background_responses",
            "Responses that run in the background here",
            registry=registry,
        )
        self.responses_not_stored = Counter(
            "pagemesh_responses_not_stored",
            "Responses that were answered but could not be kept",
            registry=registry,
        )
        self._routed = Counter(
            "pagemesh_route_requests",
            "Requests for a route, by the model that its split gave them",
            ["route", "target"],
            registry=registry,
        )
        self._passed_over = Counter(
            "pagemesh_route_targets_passed_over",
            "Requests that a split would have given to a model without an engine",
            ["route", "target"],
            registry=registry,
        )
        self.batches_running = Gauge(
            "pagemesh_batches_running",
            "Batches whose leases this gateway holds",
            registry=registry,
        )
        self._route_labels: set[tuple[str, str]] = set()
        self._unknown_fields = Counter(
            "pagemesh_unknown_fields",
            "Request fields that were ignored because nobody knows them",
            ["endpoint", "field"],
            registry=registry,
        )
        self._field_labels: set[str] = set()

    def routed(self, route: str, target: str) -> None:
        self._routed.labels(*self._route_label(route, target)).inc()

    def passed_over(self, route: str, target: str) -> None:
        self._passed_over.labels(*self._route_label(route, target)).inc()

    def _route_label(self, route: str, target: str) -> tuple[str, str]:
        label = route, target
        if label not in self._route_labels and len(self._route_labels) >= MAX_ROUTE_LABELS:
            return OTHER_ROUTE
        self._route_labels.add(label)
        return label

    def unknown_field(self, endpoint: str, field: str) -> None:
        """Clients choose the names, so only the first of them become labels."""
        if field not in self._field_labels:
            plain = all(name.isidentifier() for name in field.split("."))
            if len(self._field_labels) >= MAX_FIELD_LABELS or not plain:
                field = OTHER_FIELD
            self._field_labels.add(field)
        self._unknown_fields.labels(endpoint, field).inc()

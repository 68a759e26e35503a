"""The series of one tokenizer service."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from pagemesh.shared.distribution import Histogram


class TokenizerMetrics:
    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        in_flight: Callable[[], int],
        waiting: Callable[[], int],
    ) -> None:
        self.prompt_tokens = Counter(
            "pagemesh_tokenizer_prompt_tokens", "Prompt tokens accepted", registry=registry
        )
        self.output_tokens = Counter(
            "pagemesh_tokenizer_output_tokens", "Tokens decoded for clients", registry=registry
        )
        self.refused = Counter(
            "pagemesh_tokenizer_requests_refused",
            "Requests that ended before an engine ran them, by HTTP status",
            ["status"],
            registry=registry,
        )
        self.resubmitted = Counter(
            "pagemesh_tokenizer_choices_resubmitted",
            "Choices placed again because their engine or its link was lost",
            registry=registry,
        )
        self.encode_s = Histogram(
            registry,
            "pagemesh_tokenizer_encode_seconds",
            "Rendering, encoding and hashing of one prompt, waiting for a thread included",
        ).labels()
        self.admit_s = Histogram(
            registry,
            "pagemesh_tokenizer_admit_seconds",
            "From a request's arrival to its choices on their way to an engine",
        ).labels()
        self.token_s = Histogram(
            registry,
            "pagemesh_tokenizer_token_seconds",
            "From the arrival of an engine's tokens to their text on its way to a gateway",
        ).labels()
        requests = Gauge(
            "pagemesh_tokenizer_requests_in_flight", "Requests in flight", registry=registry
        )
        requests.set_function(in_flight)
        queue = Gauge(
            "pagemesh_tokenizer_encode_queue",
            "Prompts and questions being encoded or waiting for a thread",
            registry=registry,
        )
        queue.set_function(waiting)

"""What clients see of each model: counts, token rates and latencies. Names are an interface.

A choice is one completion of one prompt: a request of two prompts with n=3 holds six. At every
scrape, per model,

    received = finished (over all reasons) + in flight
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

LABELS: Final = ("model_name",)

# vLLM's bounds, continued downwards for small models.
FIRST_TOKEN_S: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
TOKEN_GAP_S: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
WHOLE_S: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8),
    *(1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680),
)
TOKENS: Final = (*(step * 10**power for power in range(6) for step in (1, 2, 5)), 10**6)


class ModelMetrics:
    """The series of one model, each looked up once: a delta costs no look-up of labels."""

    def __init__(self, series: RequestMetrics, model: str) -> None:
        self.prompt_tokens: Counter = series.prompt_tokens.labels(model)
        self.generation_tokens: Counter = series.generation_tokens.labels(model)
        self.first_token_s: Histogram = series.first_token_s.labels(model)
        self.token_gap_s: Histogram = series.token_gap_s.labels(model)
        self.whole_s: Histogram = series.whole_s.labels(model)
        self.tokens_of_prompt: Histogram = series.tokens_of_prompt.labels(model)
        self.tokens_of_choice: Histogram = series.tokens_of_choice.labels(model)
        self._received: Counter = series.received.labels(model)
        self._in_flight: Gauge = series.in_flight.labels(model)
        self._finished = cache(lambda reason: series.finished.labels(model, reason))

    def received(self, choices: int) -> None:
        self._received.inc(choices)
        self._in_flight.inc(choices)

    def finished(self, reason: str, choices: int) -> None:
        self._finished(reason).inc(choices)
        self._in_flight.dec(choices)

    def accepted(self, n_tokens: int) -> None:
        """A prompt of `n_tokens` was taken by its tokenizer service."""
        self.prompt_tokens.inc(n_tokens)
        self.tokens_of_prompt.observe(n_tokens)


class RequestMetrics:
    """Registered once per process. Models are few and known, so all are kept."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._models: dict[str, ModelMetrics] = {}
        self._count_choices(registry)
        self._count_tokens(registry)
        self._time_choices(registry)

    def of(self, model: str) -> ModelMetrics:
        if model not in self._models:
            self._models[model] = ModelMetrics(self, model)
        return self._models[model]

    def _count_choices(self, registry: CollectorRegistry) -> None:
        self.received = Counter(
            "pagemesh_requests_received",
            "Choices (prompts times n) of well-formed requests for a served model; each is in "
            "pagemesh_requests_in_flight until it is in vllm:request_success_total",
            LABELS,
            registry=registry,
        )
        self.in_flight = Gauge(
            "pagemesh_requests_in_flight",
            "Choices received and not yet finished",
            LABELS,
            registry=registry,
        )
        self.finished = Counter(
            "vllm:request_success",
            "Ended choices by finish reason: stop, length, abort (client gone), error, "
            "refused (before the prompt was accepted; the HTTP status says why)",
            [*LABELS, "finished_reason"],
            registry=registry,
        )

    def _count_tokens(self, registry: CollectorRegistry) -> None:
        self.prompt_tokens = Counter(
            "vllm:prompt_tokens",
            "Tokens of accepted prompts, once per prompt whatever n is",
            LABELS,
            registry=registry,
        )
        self.generation_tokens = Counter(
            "vllm:generation_tokens",
            "Tokens generated, over all choices, as they reach the gateway",
            LABELS,
            registry=registry,
        )
        self.tokens_of_prompt = _histogram(
            registry,
            "vllm:request_prompt_tokens",
            "Tokens of each accepted prompt, once per prompt whatever n is",
            TOKENS,
        )
        self.tokens_of_choice = _histogram(
            registry,
            "vllm:request_generation_tokens",
            "Tokens of each choice that ended with stop or length",
            TOKENS,
        )

    def _time_choices(self, registry: CollectorRegistry) -> None:
        self.first_token_s = _histogram(
            registry,
            "vllm:time_to_first_token_seconds",
            "From a checked request to the first token of each choice at the gateway",
            FIRST_TOKEN_S,
        )
        self.token_gap_s = _histogram(
            registry,
            "vllm:inter_token_latency_seconds",
            "Time per token between two arrivals of one choice's tokens; one observation each",
            TOKEN_GAP_S,
        )
        # Dashboards ask for either name, so the same observations are shown under both.
        registry.register(_Twin(self.token_gap_s, "vllm:time_per_output_token_seconds"))
        self.whole_s = _histogram(
            registry,
            "vllm:e2e_request_latency_seconds",
            "From a checked request to the end of each choice that ended with stop or length",
            WHOLE_S,
        )


class ChoiceTiming:
    """When the tokens of one choice came. All times are seconds of one monotonic clock."""

    __slots__ = ("_arrived_s", "_last_s", "_metrics", "_n_tokens")

    def __init__(self, metrics: ModelMetrics, arrived_s: float) -> None:
        self._metrics = metrics
        self._arrived_s = arrived_s
        self._last_s: float | None = None
        self._n_tokens = 0

    def gained(self, n_tokens: int, now_s: float) -> None:
        """One observation. Tokens that were merged on the way share the gap evenly."""
        if n_tokens == 0:
            return
        self._metrics.generation_tokens.inc(n_tokens)
        if self._last_s is None:
            self._metrics.first_token_s.observe(now_s - self._arrived_s)
        else:
            self._metrics.token_gap_s.observe((now_s - self._last_s) / n_tokens)
        self._last_s = now_s
        self._n_tokens += n_tokens

    def completed(self, now_s: float) -> None:
        """The choice ended with stop or length."""
        self._metrics.whole_s.observe(now_s - self._arrived_s)
        self._metrics.tokens_of_choice.observe(self._n_tokens)


class _Twin(Collector):
    """A histogram under a second name."""

    def __init__(self, histogram: Histogram, name: str) -> None:
        self._histogram = histogram
        self._name = name

    def collect(self) -> Iterator[Metric]:
        for metric in self._histogram.collect():
            twin = Metric(self._name, metric.documentation, metric.type)
            twin.samples = [
                sample._replace(name=self._name + sample.name.removeprefix(metric.name))
                for sample in metric.samples
            ]
            yield twin

    def describe(self) -> Iterator[Metric]:
        """So that the registry refuses a second series of this name."""
        for metric in self._histogram.describe():
            yield Metric(self._name, metric.documentation, metric.type)


def _histogram(
    registry: CollectorRegistry, name: str, text: str, bounds: Sequence[float]
) -> Histogram:
    return Histogram(name, text, LABELS, buckets=bounds, registry=registry)

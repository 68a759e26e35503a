"""The names under which RequestMetrics is shown. They are vLLM's, and an interface."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from pagemesh.gateway.request_metrics import (
    FIRST_TOKEN_S,
    NO_ENGINE,
    PARAM_N,
    PHASE_S,
    TOKEN_GAP_S,
    TOKENS,
    EngineTally,
    ModelTally,
    RequestMetrics,
)
from pagemesh.shared.distribution import Observations, add_distribution
from pagemesh.shared.messages import EngineStatus
from pagemesh.shared.metrics import LABELS


class _Total(NamedTuple):
    """A counter; its exposed name gains the suffix `_total`."""

    name: str
    help: str
    value: Callable[[EngineTally], int]


class _Distribution(NamedTuple):
    name: str
    help: str
    bounds: Sequence[float]
    observations: Callable[[EngineTally], Observations]


_TOTALS: Final = (
    _Total(
        "vllm:prompt_tokens",
        "Tokens of prompts whose first token came, once per prompt whatever n is",
        lambda tally: tally.prompt_tokens,
    ),
    _Total(
        "vllm:prompt_tokens_cached",
        "Those of vllm:prompt_tokens that did not have to be computed",
        lambda tally: tally.cached_tokens,
    ),
    _Total(
        "vllm:generation_tokens",
        "Tokens generated, over all choices, as they reach the gateway",
        lambda tally: tally.generation_tokens,
    ),
)
_GAP_S: Final = "Between two tokens of a choice at the gateway; merged ones share their gap"
_DISTRIBUTIONS: Final = (
    _Distribution(
        "vllm:time_to_first_token_seconds",
        "From a checked request to the first token of each choice at the gateway",
        FIRST_TOKEN_S,
        lambda tally: tally.first_token_s,
    ),
    # Dashboards ask for either name, so the same observations are shown under both.
    _Distribution(
        "vllm:inter_token_latency_seconds", _GAP_S, TOKEN_GAP_S, lambda tally: tally.token_gap_s
    ),
    _Distribution(
        "vllm:time_per_output_token_seconds",
        _GAP_S,
        TOKEN_GAP_S,
        lambda tally: tally.token_gap_s,
    ),
    _Distribution(
        "vllm:request_time_per_output_token_seconds",
        "Mean time per token after the first, of each choice that ended with stop or length",
        TOKEN_GAP_S,
        lambda tally: tally.token_s,
    ),
    _Distribution(
        "vllm:e2e_request_latency_seconds",
        "From a checked request to the end of each choice that ended with stop or length",
        PHASE_S,
        lambda tally: tally.whole_s,
    ),
    _Distribution(
        "vllm:request_queue_time_seconds",
        "From receipt by the engine to the first step",
        PHASE_S,
        lambda tally: tally.queue_s,
    ),
    _Distribution(
        "vllm:request_prefill_time_seconds",
        "From the first step to the first token at the engine, preemptions included",
        PHASE_S,
        lambda tally: tally.prefill_s,
    ),
    _Distribution(
        "vllm:request_decode_time_seconds",
        "From the first to the last token at the gateway, preemptions and resumes included",
        PHASE_S,
        lambda tally: tally.decode_s,
    ),
    _Distribution(
        "vllm:request_inference_time_seconds",
        "Prefill and decode together",
        PHASE_S,
        lambda tally: tally.inference_s,
    ),
    _Distribution(
        "vllm:request_prompt_tokens",
        "Tokens of each prompt whose first token came, once per prompt whatever n is",
        TOKENS,
        lambda tally: tally.tokens_of_prompt,
    ),
    _Distribution(
        "vllm:request_generation_tokens",
        "Tokens of each choice that ended with stop or length",
        TOKENS,
        lambda tally: tally.tokens_of_choice,
    ),
    _Distribution(
        "vllm:request_max_num_generation_tokens",
        "Tokens of the longest choice of each prompt",
        TOKENS,
        lambda tally: tally.longest_choice_tokens,
    ),
    _Distribution(
        "vllm:request_prefill_kv_computed_tokens",
        "Prompt tokens computed for each choice that ended with stop or length",
        TOKENS,
        lambda tally: tally.tokens_computed,
    ),
    _Distribution(
        "vllm:request_params_n", "The parameter n of each prompt", PARAM_N, lambda tally: tally.n
    ),
    _Distribution(
        "vllm:request_params_max_tokens",
        "The parameter max_tokens of each prompt, where it was given",
        TOKENS,
        lambda tally: tally.max_tokens,
    ),
)


class RequestCollector(Collector):
    """At the moment of the scrape. Engines that have generated nothing yet are shown with zeros,
    so that rates start from there; of former ones a few are shown each, the others as one."""

    def __init__(
        self, requests: RequestMetrics, engines: Callable[[], Iterable[EngineStatus]]
    ) -> None:
        self._requests = requests
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        live = [(engine.card.names[0], engine.engine_id) for engine in self._engines()]
        self._requests.fold_former({engine_id for _, engine_id in live})
        return _Shown(self._requests, live).families()

    def describe(self) -> Iterator[Metric]:
        """Registering must not ask for engines that do not exist yet."""
        return _Shown(self._requests, []).families()


class _Shown:
    """What there is to show, with zeros for the live engines (model, id) that counted nothing."""

    def __init__(self, requests: RequestMetrics, live: Sequence[tuple[str, str]]) -> None:
        self._models = {model: ModelTally() for model, _ in live} | requests.models
        self._engines = dict.fromkeys(live, EngineTally())
        for model, engine_id, tally in requests.tallies():
            self._engines[model, engine_id] = tally

    def families(self) -> Iterator[Metric]:
        yield from self._choices()
        yield self._finished()
        yield self._prompt_tokens_by_source()
        for total in _TOTALS:
            counter = CounterMetricFamily(total.name, total.help, labels=LABELS)
            for labels, tally in self._engines.items():
                counter.add_metric(labels, total.value(tally))
            yield counter
        for shown in _DISTRIBUTIONS:
            histogram = HistogramMetricFamily(shown.name, shown.help, labels=LABELS)
            for labels, tally in self._engines.items():
                so_far = shown.observations(tally).so_far()
                if labels[1] != NO_ENGINE or any(so_far.counts):
                    add_distribution(histogram, labels, shown.bounds, so_far)
            yield histogram

    def _choices(self) -> Iterator[Metric]:
        received = CounterMetricFamily(
            "pagemesh_requests_received",
            "Choices (prompts times n) of well-formed requests for a served model; each is in "
            "pagemesh_requests_in_flight until it is in vllm:request_success_total",
            labels=("model_name",),
        )
        in_flight = GaugeMetricFamily(
            "pagemesh_requests_in_flight",
            "Choices received and not yet finished",
            labels=("model_name",),
        )
        for model, tally in self._models.items():
            received.add_metric((model,), tally.n_received)
            in_flight.add_metric((model,), tally.n_in_flight)
        yield received
        yield in_flight

    def _finished(self) -> Metric:
        family = CounterMetricFamily(
            "vllm:request_success",
            "Ended choices by finish reason: stop, length, abort (client gone), error, refused "
            "(before the prompt was accepted; the HTTP status says why). Without an engine: no "
            "engine had a token of it",
            labels=(*LABELS, "finished_reason"),
        )
        for labels, tally in self._engines.items():
            for reason, count in tally.finished.items():
                family.add_metric((*labels, reason), count)
        return family

    def _prompt_tokens_by_source(self) -> Metric:
        family = CounterMetricFamily(
            "vllm:prompt_tokens_by_source",
            "Those of vllm:prompt_tokens that were computed, and those found in the prefix cache",
            labels=(*LABELS, "source"),
        )
        for labels, tally in self._engines.items():
            computed = tally.prompt_tokens - tally.cached_tokens
            family.add_metric((*labels, "local_compute"), computed)
            family.add_metric((*labels, "local_cache_hit"), tally.cached_tokens)
        return family

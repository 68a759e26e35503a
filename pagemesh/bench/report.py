"""A run as a table for people and as a JSON object for scripts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from pagemesh.bench.client_limit import client_limits, lag_p99_ms
from pagemesh.bench.client_load import ClientLoad
from pagemesh.bench.statistics import Spread, Summary

_TITLES: Final = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency (between events)",
    "e2el": "End-to-end Latency",
}
_WIDTH: Final = 58
_LABEL_WIDTH: Final = 46


@dataclass(frozen=True, slots=True)
class Report:
    """`setup` describes the run (url, model, options); `refused_ids` see target.Server.

    `n_restarts` is how often the run was started over because its clients were the limit, and
    `resent` whether the requests were the same again.
    """

    setup: dict[str, Any]
    summary: Summary
    load: ClientLoad
    n_clients: int
    refused_ids: str | None
    fixed_lengths: bool
    n_restarts: int = 0
    resent: bool = False

    def as_json(self) -> dict[str, Any]:
        """Flat, with the keys of `vllm bench serve` where it has them."""
        summary = self.summary
        return {
            **self.setup,
            "duration": summary.duration_s,
            "completed": summary.completed,
            "failed": summary.failed,
            "failures": {kind: entry._asdict() for kind, entry in summary.failures.items()},
            "total_input_tokens": summary.input_tokens,
            "total_output_tokens": summary.output_tokens,
            "output_events": summary.output_events,
            "output_tokens_from": _counted_from(summary),
            **{key: rate for key, _, rate in self._rates()},
            **_flat_latencies(summary.latency_ms),
            "client": {
                "processes": self.n_clients,
                "restarts": self.n_restarts,
                "cpu_share": self.load.cpu_share,
                "queued_share": self.load.queued_share,
                "lag_p99_ms": lag_p99_ms(self.load),
                "limits": client_limits(self.load, self.n_clients),
            },
            "notes": list(self.notes()),
        }

    def as_text(self) -> str:
        lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]
        lines += [_row(label, value) for label, value in self._counts()]
        lines += [_row(label, rate) for _, label, rate in self._rates()]
        for name, measured in self.summary.latency_ms.items():
            lines += _latency_rows(name, measured)
        lines += ["=" * _WIDTH, *self.notes(), *client_limits(self.load, self.n_clients)]
        return "\n".join(lines)

    def notes(self) -> Iterator[str]:
        """What a reader must know to trust the figures."""
        summary = self.summary
        if summary.completed:
            yield f"Output tokens are counted from {_counted_from(summary)}."
        if summary.without_prompt_count:
            yield f"Input tokens lack {summary.without_prompt_count} prompts nobody counted."
        if self.refused_ids is not None:
            yield f"Random prompts are text, about a token a word ({self.refused_ids})."
        if self.n_restarts:
            yield (
                f"Fewer client processes were the limit: the run was started over with "
                f"{self.n_clients}."
            )
            if self.resent:
                yield "Some requests went out twice: the server may have cached their prompts."
        if self.fixed_lengths and summary.short_answers:
            yield f"{summary.short_answers} answers are shorter than asked for."
        if summary.resent:
            yield (
                f"{summary.resent} requests were sent twice: the server had closed the kept "
                "connection that they took."
            )
        for kind, (n_requests, message) in summary.failures.items():
            yield f"{n_requests} requests failed: {kind} ({message})."

    def _counts(self) -> Iterator[tuple[str, float]]:
        summary = self.summary
        yield "Successful requests:", summary.completed
        yield "Failed requests:", summary.failed
        yield "Benchmark duration (s):", summary.duration_s
        yield "Total input tokens:", summary.input_tokens
        yield "Total generated tokens:", summary.output_tokens
        if summary.output_events:
            yield "Tokens per event:", summary.output_tokens / summary.output_events
        yield "Client CPU (share of a core):", self.load.cpu_share
        yield "Client lag P99 (ms):", lag_p99_ms(self.load)

    def _rates(self) -> Iterator[tuple[str, str, float]]:
        """Key, label, value."""
        summary = self.summary
        total = summary.input_tokens + summary.output_tokens
        yield "request_throughput", "Request throughput (req/s):", summary.per_s(summary.completed)
        if summary.good is not None:
            yield "request_goodput", "Request goodput (req/s):", summary.per_s(summary.good)
        output_rate = summary.per_s(summary.output_tokens)
        yield "output_throughput", "Output token throughput (tok/s):", output_rate
        yield "total_token_throughput", "Total token throughput (tok/s):", summary.per_s(total)


def _counted_from(summary: Summary) -> str:
    if summary.counted_from_events == 0:
        return "usage"
    return "events" if summary.counted_from_events == summary.completed else "usage and events"


def _flat_latencies(latency_ms: dict[str, Spread | None]) -> dict[str, float]:
    return {
        f"{statistic}_{name}_ms": value
        for name, measured in latency_ms.items()
        if measured is not None
        for statistic, value in measured._asdict().items()
    }


def _latency_rows(name: str, measured: Spread | None) -> Iterator[str]:
    if measured is None:
        return
    yield f" {_TITLES[name]} ".center(_WIDTH, "-")
    for statistic, value in measured._asdict().items():
        shown = statistic.upper() if statistic.startswith("p") else statistic.capitalize()
        yield _row(f"{shown} {name.upper()} (ms):", value)


def _row(label: str, value: float) -> str:
    shown = str(value) if isinstance(value, int) else f"{value:.2f}"
    return f"{label:<{_LABEL_WIDTH}}{shown:>{_WIDTH - _LABEL_WIDTH}}"

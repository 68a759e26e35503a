"""The rows of the comparison: one workload each, and the figure that is read from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from pagemesh.bench.options import ServeOptions

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """`figure` reads the value from the JSON of a `bench serve` run."""

    key: str
    title: str
    unit: str
    options: ServeOptions
    figure: Callable[[Figures], float]


def run_options(
    row: Row, base_url: str, *, seed: int, vocab_tokens: int, scale: float
) -> ServeOptions:
    """The run of a row. A seed draws the same token ids for every server. `scale` below 1 shrinks
    all sizes, for a trial of the script."""
    sizes: dict[str, Any] = {
        name: max(int(getattr(row.options, name) * scale), 1) for name in _SIZES
    }
    return replace(row.options, base_url=base_url, seed=seed, vocab_size=vocab_tokens, **sizes)


def _decode(n_requests: int, concurrency: int) -> ServeOptions:
    return ServeOptions(
        num_prompts=n_requests,
        max_concurrency=concurrency,
        random_input_len=128,
        random_output_len=128,
        ignore_eos=True,
        clients=1,  # Another start, with more of them, would draw other ids.
    )


_PREFILL: Final = replace(_decode(4, 1), random_input_len=1500, random_output_len=1)
_SINGLE: Final = replace(_decode(480, 16), random_input_len=5, random_output_len=1)
_PREFIX: Final = replace(
    _decode(32, 8),
    dataset_name="shared-prefix",
    prefix_repetition_prefix_len=1000,
    prefix_repetition_suffix_len=50,
    prefix_repetition_num_prefixes=1,
    prefix_repetition_output_len=16,
)
_SIZES: Final = (
    "num_prompts",
    "random_input_len",
    "random_output_len",
    "prefix_repetition_prefix_len",
    "prefix_repetition_suffix_len",
    "prefix_repetition_output_len",
)


def _output_rate(figures: Figures) -> float:
    return float(figures["output_throughput"])


def _request_rate(figures: Figures) -> float:
    return float(figures["request_throughput"])


def _duration(figures: Figures) -> float:
    return float(figures["duration"])


def _prefill_rate(figures: Figures) -> float:
    """Prompt tokens of one request over the median time to its first token."""
    per_prompt = figures["total_input_tokens"] / figures["completed"]
    return float(per_prompt / figures["median_ttft_ms"] * 1e3)


ROWS: Final = (
    Row("one", "1 stream, 128 in, 128 out", "tok/s", _decode(4, 1), _output_rate),
    Row("eight", "8 at once, 64 of 128/128", "tok/s", _decode(64, 8), _output_rate),
    Row("many", "32 at once, 64 of 128/128", "tok/s", _decode(64, 32), _output_rate),
    Row("prefill", "a prompt of 1500 tokens", "tok/s", _PREFILL, _prefill_rate),
    Row("prefix", "32 sharing 1000 of 1050, 16 out", "s", _PREFIX, _duration),
    Row("single", "16 clients, 5 in, 1 out", "req/s", _SINGLE, _request_rate),
)

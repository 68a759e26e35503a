"""`pagemesh bench throughput` and `bench latency`: the engine in this process, no sockets.

Every run has prompts of its own, so none finds another's blocks in the prefix cache.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, Protocol

from pagemesh.bench.workloads import (
    PREFILL_LENS,
    PRESETS,
    STEP_BATCHES,
    Workload,
    fixed,
)
from pagemesh.outputs import RequestOutput
from pagemesh.shared.errors import PagemeshError
from pagemesh.shared.messages import ModelCard
from pagemesh.shared.sampling import SamplingParams

_STEP_TOKENS: Final = 128
# Requests, prompt tokens and output tokens. A GPU has more to set up: kernels by shape, clocks.
_CPU_WARMUP: Final = ((1, 64, 8), (8, 100, 16))
_GPU_WARMUP: Final = (*_CPU_WARMUP, (64, 512, 32), (256, 200, 32))
_SAMPLED: Final = 0.6
_MS: Final = 1e3


class Generator(Protocol):
    """What is measured: the offline class, or anything that generates as it does."""

    @property
    def card(self) -> ModelCard: ...

    def generate(
        self, prompts: Any, sampling_params: Sequence[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]: ...


class WrongAnswer(PagemeshError):
    """A request ended early or in error, so its time means nothing."""


@dataclass(frozen=True, slots=True)
class ThroughputRun:
    """One repeat of one workload. Rates are per second, prefill included."""

    workload: str
    repeat: int
    seconds: float
    requests: int
    input_tokens: int
    output_tokens: int

    @property
    def output_throughput(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def total_token_throughput(self) -> float:
        return (self.input_tokens + self.output_tokens) / self.seconds

    @property
    def request_throughput(self) -> float:
        return self.requests / self.seconds


@dataclass(frozen=True, slots=True)
class LatencyFigure:
    """`values_ms` has one value a repeat."""

    workload: str
    figure: str
    values_ms: list[float]

    @property
    def median_ms(self) -> float:
        return median(self.values_ms)


@dataclass(frozen=True, slots=True)
class Skipped:
    workload: str
    reason: str


class OfflineBench:
    """Times workloads on one engine, which runs `warmups` first; those that the model cannot hold
    are left out. `now_s` is any clock in seconds."""

    def __init__(
        self,
        llm: Generator,
        now_s: Callable[[], float] = time.perf_counter,
        *,
        warmups: Iterable[Workload] = (),
        show: bool = True,
    ) -> None:
        self._llm = llm
        self._now_s = now_s
        self._show = show
        self._n_runs = Counter[tuple[int, ...]]()
        for workload in warmups:
            if self.does_not_fit(workload) is None:
                self._seconds(workload, show=False)

    def seconds(self, workload: Workload) -> float:
        """How long the workload takes, with what it wants cached computed before. A workload that
        ran already (W1 and W1greedy have the same ids) runs with other ids. Raises WrongAnswer when
        an answer is not complete."""
        first = tuple(workload.prompts[0])
        workload = workload.shifted(self._n_runs[first])
        self._n_runs[first] += 1
        if workload.cached:
            self._seconds(Workload([[*workload.cached, 1]], [1]), show=False)
        return self._seconds(workload, show=self._show)

    def does_not_fit(self, workload: Workload) -> str | None:
        longest, limit = workload.longest_tokens, self._llm.card.max_model_len
        if longest <= limit:
            return None
        return f"{longest} tokens are over the model's limit of {limit}"

    def _seconds(self, workload: Workload, *, show: bool) -> float:
        ids = workload.within(self._llm.card.vocab_tokens).prompts
        prompts = [{"prompt_token_ids": one} for one in ids]
        params = [_params(n_tokens, workload.temperature) for n_tokens in workload.max_tokens]
        started_s = self._now_s()
        outputs = self._llm.generate(prompts, params, use_tqdm=show)
        elapsed_s = self._now_s() - started_s
        _check(outputs, workload.max_tokens)
        return elapsed_s


def warmups(*, gpu: bool) -> Iterator[Workload]:
    """Several sizes of batches and prompts, none of which a workload has; on a GPU greedy and
    sampled, which are different kernels there."""
    for temperature in (0.0, _SAMPLED) if gpu else (0.0,):
        for shape in _GPU_WARMUP if gpu else _CPU_WARMUP:
            yield fixed(*shape, salt=f"warm{temperature}", temperature=temperature)


def throughput(
    bench: OfflineBench, draws: dict[str, Callable[[int], Workload]], n_repeats: int
) -> Iterator[ThroughputRun | Skipped]:
    """Each workload, `n_repeats` times. `draws` maps a name to repeat -> workload."""
    for name, draw in draws.items():
        for repeat in range(n_repeats):
            workload = draw(repeat)
            if (reason := bench.does_not_fit(workload)) is not None:
                yield Skipped(name, reason)
                break
            seconds = bench.seconds(workload)
            n_requests = len(workload.prompts)
            tokens = workload.input_tokens, workload.output_tokens
            yield ThroughputRun(name, repeat, seconds, n_requests, *tokens)


def latency(
    bench: OfflineBench, names: Sequence[str], n_repeats: int
) -> Iterator[LatencyFigure | Skipped]:
    """Of LATENCY_PRESETS: W4 and W5 (first token, then each), STEP (one decode step by batch
    size), PREFILL (one prompt by length)."""
    for name in names:
        if name == "STEP":
            yield from _steps(bench, n_repeats)
        elif name == "PREFILL":
            yield from _prefills(bench, n_repeats)
        else:
            yield from _stream(bench, name, n_repeats)


def _stream(bench: OfflineBench, name: str, n_repeats: int) -> Iterator[LatencyFigure | Skipped]:
    """Timed with one output token too: the difference is pure decoding."""
    first_ms, per_token_ms = [], []
    for repeat in range(n_repeats):
        workload = PRESETS[name](repeat)
        if (reason := bench.does_not_fit(workload)) is not None:
            yield Skipped(name, reason)
            return
        n_requests, input_len = len(workload.prompts), len(workload.prompts[0])
        first_s = bench.seconds(fixed(n_requests, input_len, 1, repeat, salt="first"))
        decoding_s = bench.seconds(workload) - first_s
        first_ms.append(first_s * _MS)
        per_token_ms.append(decoding_s / (workload.max_tokens[0] - 1) * _MS)
    yield LatencyFigure(name, "first token", first_ms)
    yield LatencyFigure(name, "a token after it", per_token_ms)


def _steps(bench: OfflineBench, n_repeats: int) -> Iterator[LatencyFigure | Skipped]:
    for batch in STEP_BATCHES:
        many = [_step_workload(batch, _STEP_TOKENS + 1, repeat) for repeat in range(n_repeats)]
        if (reason := bench.does_not_fit(many[0])) is not None:
            yield Skipped(f"STEP{batch}", reason)
            continue
        values_ms = []
        for repeat, workload in enumerate(many):
            prefill_s = bench.seconds(_step_workload(batch, 1, repeat))
            values_ms.append((bench.seconds(workload) - prefill_s) / _STEP_TOKENS * _MS)
        yield LatencyFigure(f"STEP{batch}", "a decode step", values_ms)


def _step_workload(batch: int, output_len: int, repeat: int) -> Workload:
    """What is timed for its prefill alone has other ids than what decodes too."""
    salt = "s1" if output_len == 1 else "s2"
    return fixed(batch, _STEP_TOKENS, output_len, repeat, salt=salt)


def _prefills(bench: OfflineBench, n_repeats: int) -> Iterator[LatencyFigure | Skipped]:
    for length in PREFILL_LENS:
        workloads = [fixed(1, length, 1, repeat, salt="p") for repeat in range(n_repeats)]
        if (reason := bench.does_not_fit(workloads[0])) is not None:
            yield Skipped(f"PREFILL{length}", reason)
            continue
        values_ms = [bench.seconds(workload) * _MS for workload in workloads]
        yield LatencyFigure(f"PREFILL{length}", "first token", values_ms)


def _params(n_tokens: int, temperature: float) -> SamplingParams:
    """Token ids only, as its peers are measured."""
    return SamplingParams(
        max_tokens=n_tokens, temperature=temperature, ignore_eos=True, detokenize=False
    )


def _check(outputs: list[RequestOutput], max_tokens: list[int]) -> None:
    for output, wanted in zip(outputs, max_tokens, strict=True):
        choice = output.outputs[0]
        if len(choice.token_ids) != wanted:
            raise WrongAnswer(
                f"request {output.request_id} has {len(choice.token_ids)} of {wanted} tokens "
                f"({choice.finish_reason}: {choice.stop_reason})"
            )

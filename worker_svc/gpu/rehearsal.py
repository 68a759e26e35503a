"""The most that a worker may be asked for, once, before requests come: it compiles every kernel and
shows the memory that everything but the KV pool takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from pagemesh.shared.engine_messages import NewRow, Step
from pagemesh.shared.errors import StartupError
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.wire import pack_ids
from pagemesh.worker_svc.gpu.card import Reading
from pagemesh.worker_svc.gpu.executor import GPUExecutor
from pagemesh.worker_svc.gpu.memory import Limit, Needs, StepTooLarge
from pagemesh.worker_svc.memory import blocks_for, is_out_of_memory
from pagemesh.worker_svc.runner import Runner

_BLOCK: Final = 1
_DEMANDING: Final = SamplingParams(
    temperature=0.7,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    logit_bias={0: 1.0},
    min_tokens=1,
    logprobs=20,
    prompt_logprobs=1,
)
# Each kind of parameters, and few rows, ask for other variants of the sampling kernels.
_FEW_ROWS: Final = 8
_KINDS: Final = (
    _DEMANDING,
    SamplingParams(temperature=0.7, top_k=50, top_p=0.9),
    SamplingParams(temperature=0.7, logit_bias={0: 1.0}),
    SamplingParams(temperature=1.0),
)
_SHORT_TOKENS: Final = 2


class Readings(NamedTuple):
    """Of the device's memory: with the weights alone, with the state of all requests, after prompts
    that fill half a step and a whole one, with graphs, and after decodes."""

    loaded: Reading
    assembled: Reading
    half: Reading
    full: Reading
    captured: Reading
    decoded: Reading


def dry_run(runner: Runner, executor: GPUExecutor) -> None:
    """Launch what a rehearsal launches, where launches are only noted: results mean nothing. The
    executor must be an eager one."""
    for step in (*_prompt_steps(runner), *_decode_steps(runner)):
        runner.launch(step).wait()
    executor.launch_largest()
    executor.launch_hot()
    runner.reset()


def rehearse(
    assemble: Callable[[], tuple[Runner, GPUExecutor]],
    read: Callable[[], Reading],
    weights_bytes: int,
) -> Needs:
    """What a worker takes beside its pool. `assemble` gives one over a pool of one block, whose
    content nobody reads later.

    Raises StepTooLarge when the device has not the memory, StartupError when a step fails.
    """
    gauge = _Gauge(read)
    try:
        runner, executor = assemble()
        assembled = gauge.read("max_num_seqs")
        prompts = _prompt_steps(runner)
        _, half, full = (gauge.run(runner, step, "step_tokens") for step in prompts)
        # Its own part of the memory grows with rows, so it tells nothing of a token's.
        executor.launch_largest()
        full = full._replace(free_bytes=gauge.read("step_tokens").free_bytes)
        executor.capture()
        captured = gauge.read("max_num_seqs")
        for step in _decode_steps(runner):
            decoded = gauge.run(runner, step, "max_num_seqs")
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise StepTooLarge("max_num_seqs") from error
        raise
    runner.reset()
    readings = Readings(gauge.loaded, assembled, half, full, captured, decoded)
    return needs_of(readings, weights_bytes, prompts[2].n_tokens - prompts[1].n_tokens)


def needs_of(readings: Readings, weights_bytes: int, more_tokens: int) -> Needs:
    """`more_tokens`: in a whole step than in half a one. What has gone from the free memory may be
    others' doing, and what is reserved is not all that we take: the larger counts."""
    loaded, last = readings.loaded, readings.decoded
    taken_bytes = max(
        loaded.free_bytes - last.free_bytes, last.reserved_bytes - loaded.reserved_bytes
    )
    slots_bytes = readings.assembled.allocated_bytes - loaded.allocated_bytes
    graphs_bytes = max(0, readings.full.free_bytes - readings.captured.free_bytes)
    more_bytes = max(0, readings.full.peak_bytes - readings.half.peak_bytes)
    return Needs(
        weights_bytes=weights_bytes,
        slots_bytes=slots_bytes,
        step_bytes=max(0, taken_bytes - slots_bytes - graphs_bytes),
        step_bytes_per_token=more_bytes / max(1, more_tokens),
        graphs_bytes=graphs_bytes,
    )


class _Gauge:
    """Runs steps and reads the memory after each."""

    def __init__(self, read: Callable[[], Reading]) -> None:
        self._read = read
        self.loaded: Final = read()

    def read(self, limit: Limit) -> Reading:
        """Raises StepTooLarge when an allocation has failed, even if the step passed in parts."""
        reading = self._read()
        if reading.n_failed > self.loaded.n_failed:
            raise StepTooLarge(limit)
        return reading

    def run(self, runner: Runner, step: Step, limit: Limit) -> Reading:
        result = runner.execute(step)
        reading = self.read(limit)
        if result.failed:
            raise StartupError(
                f"a step of {step.n_tokens} tokens cannot be computed ({result.failed[0][1]})"
            )
        return reading


def _prompt_steps(runner: Runner) -> tuple[Step, Step, Step]:
    """A short prompt, for which attention has a variant of its own; half a step and a whole one."""
    most_tokens = runner.capacity.max_num_batched_tokens
    short, half = min(_SHORT_TOKENS, most_tokens), max(1, most_tokens // 2)
    short_step, half_step, whole_step = (
        _prompt_step(runner, n_tokens) for n_tokens in (short, half, most_tokens)
    )
    return short_step, half_step, whole_step


def _prompt_step(runner: Runner, n_tokens: int) -> Step:
    """Of prompts that are scored, as long as they may be."""
    longest = runner.card.max_model_len
    lengths = [min(longest, n_tokens - start) for start in range(0, n_tokens, longest)]
    scored = enumerate(lengths[: runner.capacity.max_num_seqs])
    return _step([_row(runner, slot, length, length, _DEMANDING) for slot, length in scored])


def _decode_steps(runner: Runner) -> Iterator[Step]:
    most_rows, known = runner.capacity.max_num_seqs, min(2, runner.card.max_model_len)
    for n_rows in (most_rows, min(_FEW_ROWS, most_rows)):
        for params in _KINDS:
            yield _step([_row(runner, slot, known, 1, params) for slot in range(n_rows)])


def _row(runner: Runner, slot: int, known: int, n_tokens: int, params: SamplingParams) -> NewRow:
    """A request of `known` tokens, of which the last `n_tokens` are still to be computed."""
    return NewRow(
        slot=slot,
        ids=pack_ids([0] * known),
        n_prompt=known,
        seed=slot,
        params=params,
        blocks=pack_ids([_BLOCK] * blocks_for(known, runner.card.block_tokens)),
        computed=known - n_tokens,
    )


def _step(rows: list[NewRow]) -> Step:
    """A snapshot of these rows alone, which compute what they have left."""
    n_tokens = [row.n_prompt - row.computed for row in rows]
    chunks = [word for row, n in zip(rows, n_tokens, strict=True) for word in (row.slot, n)]
    return Step(0, 1, 0, len(rows), sum(n_tokens), new=rows, chunks=pack_ids(chunks))

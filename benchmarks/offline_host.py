"""What a step of the offline class costs the host: all its Python, around a device that takes no
time.

    python benchmarks/offline_host.py [--rows 1 8 64 256] [--device-us 1000 1000 1500 3000]
        [--steps 400] [--repeats 7] [--model NAME]

The classes are the real ones; the executor alone is scripted: its tokens are there at once. Prints
the CPU time of a decode step in microseconds by part, for each number of running requests, with
stop strings, with text and with token ids only (`SamplingParams.detokenize`); then that of a
request's entry, when all of them come in one call. CPU time of both threads together: they share
one interpreter, so a device that is faster than this sum waits for it. Last, how long a device
waits that takes `device-us` for a step. The best of `repeats` runs.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from pagemesh import LLM, SamplingParams
from pagemesh.prepare import prepare
from pagemesh.shared.engine_messages import NewRow
from pagemesh.shared.messages import Capacity, ModelCard
from pagemesh.shared.prepared import load_prepared
from pagemesh.shared.settings import ModelSettings, Settings
from pagemesh.worker_svc.batch import Batch, Ints, Rows, WireInts
from pagemesh.worker_svc.executor import Computed, at_once
from pagemesh.worker_svc.memory import CPU_NUM_SEQS
from pagemesh.worker_svc.runner import Runner
from pagemesh.worker_svc.sampler import NO_LOGPROBS, SampledRows

BLOCK_TOKENS: Final = 16
PROMPT_TOKENS: Final = 128
PARTS: Final = ("check", "submit", "plan", "launch", "land", "apply", "take")
KINDS: Final[dict[str, dict[str, Any]]] = {
    "stop": {"stop": ["\n\nUser:"]},
    "text": {},
    "ids": {"detokenize": False},
}
US: Final = 1e6


class Device:
    """Takes `step_s` for each step, one after the other. `idle_s` is how long it had nothing to do
    since its first."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._busy_until_s: float | None = None
        self.idle_s = 0.0

    def launch(self) -> Callable[[], None]:
        """Returns what waits until the step is done."""
        now_s = time.perf_counter()
        begin_s = max(now_s, self._busy_until_s or now_s)
        self.idle_s += begin_s - (self._busy_until_s or begin_s)
        self._busy_until_s = done_s = begin_s + self._step_s
        return lambda: time.sleep(max(done_s - time.perf_counter(), 0.0))


class PresetExecutor:
    """An `Executor` whose tokens are drawn beforehand. They are there at once, or when `device`
    would have them."""

    device: Device | None = None

    def __init__(self, vocab_tokens: int, max_rows: int) -> None:
        draw = np.random.default_rng(0).integers(3, vocab_tokens, 64 * max_rows)
        self._tokens = torch.from_numpy(draw)
        self._finite = np.ones(max_rows, np.bool_)
        self._first = 0

    def compute(self, rows: Rows) -> Computed:
        n = int(rows.samples.sum())
        self._first = (self._first + 7) % (len(self._tokens) - n)
        tokens = self._tokens[self._first : self._first + n]
        sampled = SampledRows(tokens, self._finite[:n], NO_LOGPROBS, None)
        return Computed(sampled, [], [], tokens, self.device.launch() if self.device else at_once)

    def enter(self, row: NewRow, ids: WireInts) -> None: ...
    def leave(self, slots: Ints) -> None: ...
    def grow(self, slots: Ints, columns: Ints, blocks: Ints) -> None: ...
    def copy_blocks(self, src: Ints, dst: Ints) -> None: ...
    def commit(self, rows: Rows, tokens: torch.Tensor | None) -> None: ...
    def clear(self) -> None: ...
    def relieve(self) -> None: ...


def preset_runner(settings: Settings) -> Runner:
    prepared = load_prepared(prepare(settings.model))
    max_rows, max_len = settings.scheduler.max_num_seqs or CPU_NUM_SEQS, 8192
    card = ModelCard(
        [prepared.name],
        prepared.vocab_tokens,
        max_len,
        BLOCK_TOKENS,
        "bfloat16",
        prepared.eos_token_ids,
        prepared.bos_token_id,
        prepared.fingerprint,
        prepared.created_s,
    )
    blocks_each = -(-max_len // BLOCK_TOKENS)
    capacity = Capacity(1 + max_rows * blocks_each, max_rows, 2**20, 1024, "preset")
    batch = Batch(
        max_num_seqs=max_rows,
        max_model_len=max_len,
        vocab_tokens=prepared.vocab_tokens,
        block_tokens=BLOCK_TOKENS,
        num_blocks=capacity.num_blocks,
    )
    executor = PresetExecutor(prepared.vocab_tokens, max_rows)
    return Runner(executor, batch, card, capacity)


class Spent(NamedTuple):
    """CPU seconds of one call, `whole` with what `parts` do not name."""

    whole: float
    parts: Counter[str]

    def line(self, n: int) -> str:
        named = {part: self.parts[part] for part in PARTS}
        named |= {"rest": self.whole - sum(named.values()), "sum": self.whole}
        return "".join(f"{seconds / n * US:>9.1f}" for seconds in named.values())


class Stopwatch:
    """Adds up the CPU time that calls take, by part, each in the thread that makes it."""

    def __init__(self) -> None:
        self.spent_s: Counter[str] = Counter()

    def watch(self, owner: Any, method: str, part: str, within: str | None = None) -> None:
        """`within`: the part that makes the call, which is not to be charged for it."""
        call: Callable[..., Any] = getattr(owner, method)

        def watched(*arguments: Any) -> Any:
            begin_s = time.thread_time()
            try:
                return call(*arguments)
            finally:
                seconds = time.thread_time() - begin_s
                self.spent_s[part] += seconds
                if within is not None:
                    self.spent_s[within] -= seconds

        setattr(owner, method, watched)


class Bench:
    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._draw = np.random.default_rng(0)
        self._watch = Stopwatch()
        loop = llm._loop
        self._watch.watch(llm, "_check", "check")
        self._watch.watch(loop, "_feed", "submit")
        self._watch.watch(loop._engine, "plan", "plan")
        self._watch.watch(loop._runner, "launch", "launch")
        self._watch.watch(loop, "_land", "land")
        self._watch.watch(loop._engine, "apply", "apply", within="land")
        self._watch.watch(loop, "_deliver", "take")

    def call(self, rows: int, n_tokens: int, **params: Any) -> Spent:
        """`rows` prompts in one call, so many tokens for each."""
        vocab = self._llm.card.vocab_tokens
        prompts = self._draw.integers(3, vocab, (rows, PROMPT_TOKENS)).tolist()
        given = [{"prompt_token_ids": ids} for ids in prompts]
        sampling = SamplingParams(max_tokens=n_tokens, temperature=0, ignore_eos=True, **params)
        self._watch.spent_s.clear()
        begin_s = time.process_time()
        self._llm.generate(given, sampling, use_tqdm=False)
        return Spent(time.process_time() - begin_s, self._watch.spent_s.copy())

    def idle_us(self, n_repeats: int, rows: int, n_steps: int, device_us: int) -> list[float]:
        """How long the device waits for each step, of a call at a time."""
        executor: Any = self._llm._loop._runner._executor
        waited = []
        for _ in range(n_repeats):
            executor.device = Device(device_us / US)
            self.call(rows, n_steps, **KINDS["ids"])
            waited.append(executor.device.idle_s / n_steps * US)
        executor.device = None
        return waited

    def best(self, n_repeats: int, rows: int, n_tokens: int, **params: Any) -> Spent:
        runs = (self.call(rows, n_tokens, **params) for _ in range(n_repeats))
        return min(runs, key=lambda run: run.whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--device-us", type=int, nargs="+", default=[1000, 1000, 1500, 3000])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--model", default=ModelSettings().model)
    args = parser.parse_args()
    if len(args.device_us) != len(args.rows):
        parser.error("--device-us takes as many numbers as --rows")
    with patch("pagemesh.llm_loop.build_runner", preset_runner):
        bench = Bench(LLM(args.model, max_num_seqs=max(args.rows)))
    titles = "".join(f"{part:>9}" for part in (*PARTS, "rest", "sum"))
    print(f"{'us a decode step':<24}{titles}")
    for kind, params in KINDS.items():
        for rows in args.rows:
            spent = bench.best(args.repeats, rows, args.steps, **params)
            print(f"{f'{rows} rows, {kind}':<24}{spent.line(args.steps)}", flush=True)
    print(f"{'us a request that enters':<24}{titles}")
    for rows in args.rows:
        spent = bench.best(args.repeats, rows, 1, **KINDS["ids"])
        print(f"{f'{rows} at once':<24}{spent.line(rows)}")
    print("us a step that the device waits: best, median, worst")
    for rows, device_us in zip(args.rows, args.device_us, strict=True):
        waited = sorted(bench.idle_us(args.repeats, rows, args.steps, device_us))
        name = f"{rows} rows, {device_us} us each"
        print(f"{name:<24}{waited[0]:>9.1f}{median(waited):>9.1f}{waited[-1]:>9.1f}")


if __name__ == "__main__":
    main()

"""What one step costs the scheduler: plan, apply and both frames, at steady decode with some churn.

    python benchmarks/scheduler_core.py [--rows 256 1024] [--steps 2000] [--churn 0.004]

Prints, per number of decode rows, the CPU time of a step in milliseconds (median, 99th
percentile), the size of its Step frame, and where the median goes. CPU time, so that what else
runs on the machine shows little.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from statistics import median, quantiles

from pagemesh.scheduler_svc.engine import Engine
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.settings import SchedulerSettings
from pagemesh.shared.wire import (
    Capacity,
    ModelCard,
    Step,
    StepResult,
    Submit,
    decode,
    encode,
    pack_ids,
)

PROMPT_TOKENS = 128
OWNER = "tokenizer"
CARD = ModelCard(["bench"], 32_000, 8192, 16, "bfloat16", [2], 1, "bench", 0)
PARTS = ("plan", "encode step", "decode result", "apply", "encode tokens")


class Bench:
    """One engine kept at `rows` requests; a share `churn` of them is replaced in each step."""

    def __init__(self, rows: int, churn: float) -> None:
        capacity = Capacity(1 + rows * 40, rows, 8192, 1024, "cpu")
        settings = SchedulerSettings(max_num_seqs=rows, run_ahead_depth=1)
        self.engine = Engine("bench", CARD, capacity, settings, epoch=1, prefix_caching=True)
        self.random = random.Random(0)
        self.rows, self.churn, self.keys = rows, churn, 0
        self.live: list[int] = []
        for _ in range(rows):
            self.submit()
        while self.engine.stats().waiting:
            self.step()
        for _ in range(20):
            self.step()

    def submit(self) -> None:
        self.keys += 1
        prompt = pack_ids(self.random.choices(range(3, CARD.vocab_tokens), k=PROMPT_TOKENS))
        params = SamplingParams(max_tokens=450, ignore_eos=True)
        submit = Submit(self.keys, f"r{self.keys}", 0, "bench", prompt, b"", 0, params, b"")
        self.engine.submit(OWNER, submit, 0.0)
        self.live.append(self.keys)

    def replace_some(self) -> None:
        ended = [key for key in self.live if self.random.random() < self.churn]
        self.engine.end(OWNER, ended, "stop", 0.0)
        self.replace(ended)

    def replace(self, ended: list[int]) -> None:
        self.live = [key for key in self.live if key not in set(ended)]
        for _ in ended:
            self.submit()

    def step(self) -> tuple[list[float], int]:
        """Seconds of each of PARTS, and bytes of the Step frame."""
        clock = time.thread_time
        times = [clock()]
        step = self.engine.plan(0.0)
        assert step is not None
        times.append(clock())
        frame = encode(step)
        times.append(clock())
        answer = encode(self.answer(step))
        start = clock()
        result = decode(answer)
        assert isinstance(result, StepResult)
        decoded = clock()
        tokens = self.engine.apply(result, 0.0)
        applied = clock()
        for gained in tokens.values():
            encode(gained)
        encoded = clock()
        self.replace([ended.key for gained in tokens.values() for ended in gained.ended])
        parts = [times[1] - times[0], times[2] - times[1]]
        return [*parts, decoded - start, applied - decoded, encoded - applied], len(frame)

    @staticmethod
    def answer(step: Step) -> StepResult:
        return StepResult(step.epoch, step.step, pack_ids([7] * step.n_rows))


def measure(rows: int, steps: int, churn: float) -> None:
    bench = Bench(rows, churn)
    gc.collect()
    gc.freeze()
    samples, frame_bytes = [], []
    for _ in range(steps):
        bench.replace_some()
        parts, size = bench.step()
        samples.append(parts)
        frame_bytes.append(size)
    totals = sorted(sum(parts) * 1e3 for parts in samples)
    p99 = quantiles(totals, n=100)[98]
    shares = ", ".join(
        f"{name} {median(parts[i] for parts in samples) * 1e3:.3f}" for i, name in enumerate(PARTS)
    )
    print(
        f"{rows:5} rows: {median(totals):.3f} ms (p99 {p99:.3f}), "
        f"frame {median(frame_bytes) / rows:.1f} bytes a row; {shares}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--churn", type=float, default=0.004)
    args = parser.parse_args()
    for rows in args.rows:
        measure(rows, args.steps, args.churn)


if __name__ == "__main__":
    main()

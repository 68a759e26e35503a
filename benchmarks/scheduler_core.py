"""What one step costs the scheduler: plan, apply and both frames, at decode with some churn.

    python benchmarks/scheduler_core.py [--rows 256 1024] [--steps 2000] [--churn 0.004]

A share `churn` of the requests ends in each step and is replaced by new ones; every full block is
hashed, published and, when its request is gone, evicted in turn. Prints, per number of rows, the
CPU time of a step in milliseconds (median, 99th percentile), the size of its Step frame, and where
the median goes. Taking in the new requests and ending the old ones is timed apart ("intake"). CPU
time, so that what else runs on the machine shows little; a neighbour on the same core still slows
everything down, so the median of the quietest tenth of the run (by windows) is shown too.
"""

from __future__ import annotations

import argparse
import random
import time
from statistics import fmean, median, quantiles

from pagemesh.scheduler_svc.collector import rare_collections
from pagemesh.scheduler_svc.engine import Engine
from pagemesh.shared.engine_messages import Step, StepResult, Submit
from pagemesh.shared.hashing import chain_hashes
from pagemesh.shared.messages import Capacity, ModelCard
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.settings import SchedulerSettings
from pagemesh.shared.wire import decode, encode, pack_ids

OWNER = "tokenizer"
BLOCK_TOKENS = 16
CARD = ModelCard(["bench"], 32_000, 8192, BLOCK_TOKENS, "bfloat16", [2], 1, "bench", 0)
PARTS = ("plan", "encode step", "decode result", "apply", "encode tokens", "intake")
WINDOW_STEPS = 50


class Bench:
    """One engine kept at `rows` requests; a share `churn` of them is replaced in each step."""

    def __init__(self, rows: int, churn: float) -> None:
        capacity = Capacity(1 + rows * 48, rows, 8192, 1024, "cpu")
        settings = SchedulerSettings(max_num_seqs=rows, run_ahead_depth=1)
        self.engine = Engine("bench", CARD, capacity, settings, epoch=1, prefix_caching=True)
        self.random = random.Random(0)
        self.churn, self.keys = churn, 0
        self.live: list[int] = []
        self.replace([], rows)
        while self.engine.stats().waiting:
            self.step()
        for _ in range(WINDOW_STEPS):
            self.step()

    def submission(self) -> Submit:
        self.keys += 1
        self.live.append(self.keys)
        n = self.random.randint(64, 192)
        prompt = pack_ids(self.random.choices(range(3, CARD.vocab_tokens), k=n))
        hashes = b"".join(chain_hashes(prompt, BLOCK_TOKENS))
        params = SamplingParams(max_tokens=self.random.randint(300, 500), ignore_eos=True)
        return Submit(self.keys, f"r{self.keys}", 0, "bench", prompt, b"", 0, params, hashes)

    def replace(self, ended: list[int], n_new: int) -> float:
        """Seconds to end `ended` and take in `n_new` requests."""
        new = [self.submission() for _ in range(n_new)]
        start = time.thread_time()
        self.engine.end(OWNER, ended, "stop", 0.0)
        for submit in new:
            self.engine.submit(OWNER, submit, 0.0)
        return time.thread_time() - start

    def step(self) -> tuple[list[float], int]:
        """Seconds of each of PARTS, and bytes of the Step frame."""
        clock = time.thread_time
        leaving = [key for key in self.live if self.random.random() < self.churn]
        gone = set(leaving)
        self.live = [key for key in self.live if key not in gone]
        intake = self.replace(leaving, len(leaving))
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
        over = [ended.key for gained in tokens.values() for ended in gained.ended]
        self.live = [key for key in self.live if key not in set(over)]
        intake += self.replace([], len(over))
        parts = [times[1] - times[0], times[2] - times[1]]
        return [*parts, decoded - start, applied - decoded, encoded - applied, intake], len(frame)

    @staticmethod
    def answer(step: Step) -> StepResult:
        return StepResult(step.epoch, step.step, pack_ids([7] * step.n_rows))


def measure(rows: int, steps: int, churn: float) -> None:
    bench = Bench(rows, churn)
    samples, frame_bytes = [], []
    with rare_collections():
        for _ in range(steps):
            parts, size = bench.step()
            samples.append([part * 1e3 for part in parts])
            frame_bytes.append(size)
    report(rows, samples, frame_bytes)


def report(rows: int, samples: list[list[float]], frame_bytes: list[int]) -> None:
    totals = [sum(parts[:-1]) for parts in samples]
    windows = [totals[i : i + WINDOW_STEPS] for i in range(0, len(totals), WINDOW_STEPS)]
    quiet = sorted(median(window) for window in windows)[len(windows) // 10]
    shares = ", ".join(
        f"{name} {median(parts[i] for parts in samples):.3f}" for i, name in enumerate(PARTS)
    )
    print(
        f"{rows:5} rows: {median(totals):.3f} ms (p99 {quantiles(totals, n=100)[98]:.3f}, "
        f"quiet {quiet:.3f}); frame {fmean(frame_bytes) / rows:.1f} bytes a row; {shares}"
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

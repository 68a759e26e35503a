"""The sampler alone: milliseconds of a step's sampling, the kernels beside their reference.

    python benchmarks/sampler.py --threads 2 --spread 2

Logits are normal with the given standard deviation: the smaller, the more tokens a draw has to
choose from. Both sides take turns on the same logits, written anew before each turn. Prints for
each the best and the median wall time, and the median time of all the process's cores.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagemesh.kernels.cpu.team import Team
from pagemesh.kernels.logprobs import token_logprobs
from pagemesh.kernels.sample_rows import sample_rows
from pagemesh.shared.sampling import SamplingParams
from pagemesh.worker_svc.sampler import Sampler
from pagemesh.worker_svc.sampling_state import SamplingState

WORK = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=1.0),
    "top_p 0.95": SamplingParams(temperature=1.0, top_p=0.95),
    "top_k 40": SamplingParams(temperature=1.0, top_k=40),
    "top_k 40, top_p 0.9": SamplingParams(temperature=0.8, top_k=40, top_p=0.9),
    "min_p 0.05": SamplingParams(temperature=1.0, min_p=0.05),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.5),
    "bias": SamplingParams(temperature=0.0, logit_bias={7: 2.0, 8: -2.0}),
    "logprobs 5": SamplingParams(temperature=0.0, logprobs=5),
}
KNOWN_TOKENS = 500
Step = Callable[[Tensor], object]


class Times(NamedTuple):
    best_ms: float
    median_ms: float
    cpu_ms: float


def steps(params: SamplingParams, n_rows: int, vocab_tokens: int, team: Team) -> tuple[Step, Step]:
    """The reference's and the kernels' work for a step of rows with the same parameters."""
    state = SamplingState(
        max_num_seqs=n_rows,
        vocab_tokens=vocab_tokens,
        eos_token_ids=[2],
        device=torch.device("cpu"),
    )
    for slot in range(n_rows):
        known = torch.randint(vocab_tokens, (KNOWN_TOKENS,), dtype=torch.int32)
        state.enter(slot, params, slot, known, KNOWN_TOKENS // 2)
    sampler = Sampler(state, team)
    slots = np.arange(n_rows)
    positions, n_output = slots + KNOWN_TOKENS, np.full(n_rows, KNOWN_TOKENS // 2)

    def reference(logits: Tensor) -> None:
        raw = logits.clone() if params.logprobs is not None else logits
        tokens, _ = sample_rows(logits, state.inputs(slots, positions, n_output))
        if params.logprobs is not None:
            token_logprobs(raw, torch.arange(n_rows), tokens, params.logprobs)

    return reference, lambda logits: sampler(logits, slots, positions, n_output)


def measure(sides: tuple[Step, Step], source: Tensor, seconds: float) -> list[Times]:
    wall: tuple[list[float], list[float]] = [], []
    cpu: tuple[list[float], list[float]] = [], []
    logits = torch.empty_like(source)
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s or len(wall[0]) < 5:
        for side, run in enumerate(sides):
            logits.copy_(source)
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            run(logits)
            wall[side].append(1e3 * (time.perf_counter() - start_s))
            cpu[side].append(1e3 * (time.process_time() - start_cpu_s))
    return [
        Times(min(w), statistics.median(w), statistics.median(c))
        for w, c in zip(wall, cpu, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--vocab-tokens", type=int, default=49152)
    parser.add_argument("--spread", type=float, default=1.0, help="of the logits")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each line")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    team = Team(args.threads)
    print(
        f"{'ms a step':22}{'rows':>5}   reference: best median    cpu   kernels: best median    cpu"
    )
    for name, params in WORK.items():
        for n_rows in args.rows:
            source = torch.randn(n_rows, args.vocab_tokens) * args.spread
            sides = steps(params, n_rows, args.vocab_tokens, team)
            sides[1](source.clone())  # compiles what is not compiled yet
            before, after = measure(sides, source, args.seconds)
            columns = "".join(f"{value:7.2f}" for value in before)
            kernels = "".join(f"{value:7.3f}" for value in after)
            print(f"{name:22}{n_rows:5}          {columns}       {kernels}", flush=True)


if __name__ == "__main__":
    main()

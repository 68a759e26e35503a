"""Where requests land when there are many workers: the real dispatch code on a virtual clock.

    python benchmarks/placement_simulation.py [--workers 64 --rows 256 --schedulers 8
        --dispatchers 8] [--fill 0.7] [--seconds 10] [--policy cheapest without-index in-turn]

One process. Conversations of eight turns over shared system prompts keep `fill` of all rows busy;
workers are simulated by a step time, a queue of prompts and an LRU cache. Reports reach the
dispatchers every 0.2 s, as in a mesh. Prints, for each policy: requests for each row of a worker's
batch (mean over workers, and the least, the 99th percentile and the largest, averaged over time),
the share of prompt tokens found in a cache, the wait for a row and until the first token, the most
placed on one worker between two of its reports (herds), and what a decision and the report of one
scheduler cost a dispatcher, in microseconds (medians).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import fmean, median, quantiles
from typing import Final

from parts.placement_world import (
    ANSWER_TOKENS,
    PACE,
    THINK_S,
    Figures,
    Policy,
    Shape,
    World,
    cheapest,
    in_turn,
    without_index,
)

POLICIES: Final[dict[str, Policy]] = {
    "cheapest": cheapest,
    "without-index": without_index,
    "in-turn": in_turn,
}
COLUMNS: Final = (
    *("policy", "mean", "least", "p99", "most", "hits", "queue p99", "TTFT p50", "TTFT p99"),
    *("herd", "µs/decision", "µs/report"),
)


def conversations(workers: int, rows: int, fill: float) -> int:
    """As many as keep `fill` of all rows busy."""
    step_s = PACE.overhead_s + fill * rows * PACE.token_s
    answer_s = ANSWER_TOKENS * step_s
    return round(fill * workers * rows * (answer_s + THINK_S) / answer_s)


def p99(values: Sequence[float]) -> float:
    return quantiles(values, n=100)[98]


def line(policy: str, figures: Figures) -> str:
    mean, least, high, most = (fmean(values) for values in zip(*figures.loads, strict=True))
    cells = (
        policy,
        *(f"{value:.2f}" for value in (mean, least, high, most)),
        f"{figures.hit_tokens / figures.prompt_tokens:.1%}",
        f"{p99(figures.queued_s):.3f} s",
        f"{median(figures.first_token_s):.3f} s",
        f"{p99(figures.first_token_s):.3f} s",
        str(figures.burst),
        f"{median(figures.decision_s) * 1e6:.0f}",
        f"{median(figures.update_s) * 1e6:.0f}",
    )
    return "".join(f"{cell:>14}" for cell in cells)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--rows", type=int, default=256, help="of a worker's batch")
    parser.add_argument("--schedulers", type=int, default=8)
    parser.add_argument("--dispatchers", type=int, default=8, help="tokenizer services")
    parser.add_argument("--fill", type=float, default=0.7, help="share of all rows in use")
    parser.add_argument("--system-prompts", type=int, default=40)
    parser.add_argument("--blocks", type=int, default=20_000, help="of a worker's KV pool")
    parser.add_argument("--warm-up", type=float, default=10.0, help="virtual seconds")
    parser.add_argument("--seconds", type=float, default=10.0, help="measured, virtual")
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=list(POLICIES))
    return parser.parse_args()


def main() -> None:
    args = parse()
    shape = Shape(
        args.workers,
        args.rows,
        args.schedulers,
        args.dispatchers,
        conversations(args.workers, args.rows, args.fill),
        args.system_prompts,
        args.blocks,
    )
    print(f"{shape}")
    print("".join(f"{name:>14}" for name in COLUMNS), flush=True)
    for name in args.policy:
        figures = World(shape, POLICIES[name]).run(args.warm_up, args.seconds)
        print(line(name, figures), flush=True)


if __name__ == "__main__":
    main()

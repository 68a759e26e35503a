"""What placing requests by their prefixes brings, and what it costs.

    python benchmarks/placement.py goodput       real services, workers with scripted step times
    python benchmarks/placement.py index         the prefix index in a Valkey of its own

`goodput` holds the same conversations with one worker that holds everything, with ours on several
workers, and with round robin on as many: the share of prompt tokens that were cached, and requests
a second with a TTFT of at most 1 s and 100 ms between tokens (mean of a request). `index` prints
the memory of a cached block in several layouts, and what a call costs in Redis and from Python. Run
`pagemesh prepare` once before.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Final

from parts.conversations import Outcome, Plan, converse
from parts.index_cost import measure_index
from parts.mesh import running_mesh
from parts.scripted_worker import BLOCKS, TOKEN_S

ROWS: Final = 64


async def outcome(args: argparse.Namespace, workers: int, blocks: int, tokenizer: str) -> Outcome:
    plan = Plan(
        *(args.conversations, args.turns, args.systems),
        *(args.system_words, args.turn_words, args.answer_tokens, args.think_s),
    )
    environ = {TOKEN_S: str(args.token_ms / 1e3), BLOCKS: str(blocks)}
    async with running_mesh(
        args.step_ms / 1e3,
        ROWS,
        tokenizers=args.tokenizers,
        workers=workers,
        max_num_batched_tokens=args.step_tokens,
        environ=environ,
        modules={"tokenizer": tokenizer} if tokenizer else {},
    ) as mesh:
        return await converse(mesh.url, plan)


async def measure_goodput(args: argparse.Namespace) -> None:
    shapes = {
        "one worker": (1, args.blocks * args.workers * 2, ""),
        "ours": (args.workers, args.blocks, ""),
        "round robin": (args.workers, args.blocks, "parts.round_robin"),
    }
    print(f"{'':14}{'hit rate':>10}{'goodput/s':>11}{'good':>7}{'TTFT p50 s':>12}{'p95 s':>8}")
    outcomes = {}
    for name in args.shapes:
        outcomes[name] = came = await outcome(args, *shapes[name])
        good = sum(turn.good for turn in came.turns) / len(came.turns)
        print(
            f"{name:14}{came.hit_rate:10.3f}{came.goodput:11.2f}{good:7.0%}"
            f"{came.ttft_s(0.5):12.3f}{came.ttft_s(0.95):8.3f}",
            flush=True,
        )
    if {"ours", "one worker"} <= outcomes.keys():
        rate = outcomes["ours"].hit_rate / outcomes["one worker"].hit_rate
        print(f"hit rate: {rate:.3f} of one worker's")
    if {"ours", "round robin"} <= outcomes.keys():
        ratio = outcomes["ours"].goodput / max(outcomes["round robin"].goodput, 1e-9)
        print(f"goodput: {ratio:.2f} of round robin's")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    modes = parser.add_subparsers(dest="mode", required=True)
    goodput = modes.add_parser("goodput")
    goodput.add_argument("--conversations", type=int, default=64)
    goodput.add_argument("--turns", type=int, default=8)
    goodput.add_argument("--systems", type=int, default=40, help="shared system prompts")
    goodput.add_argument("--system-words", type=int, default=700)
    goodput.add_argument("--turn-words", type=int, default=40)
    goodput.add_argument("--answer-tokens", type=int, default=32)
    goodput.add_argument("--think-s", type=float, default=3.0)
    goodput.add_argument("--workers", type=int, default=4)
    goodput.add_argument("--tokenizers", type=int, default=2)
    goodput.add_argument("--blocks", type=int, default=3072, help="of 16 tokens, of each worker")
    goodput.add_argument("--step-ms", type=float, default=10.0)
    goodput.add_argument("--token-ms", type=float, default=0.5, help="of each token of a step")
    goodput.add_argument("--step-tokens", type=int, default=128, help="most tokens of a step")
    shapes = ("one worker", "ours", "round robin")
    goodput.add_argument("--shapes", nargs="+", choices=shapes, default=list(shapes))
    goodput.set_defaults(run=measure_goodput)
    index = modes.add_parser("index")
    index.add_argument("--blocks", type=int, default=500_000, help="cached, of all engines")
    index.add_argument("--calls", type=int, default=300, help="for each figure")
    index.set_defaults(run=measure_index)
    return parser.parse_args()


def main() -> None:
    args = parse()
    asyncio.run(args.run(args))


if __name__ == "__main__":
    main()

"""Throughput beside a neighbour that keeps the cores busy, over throughput alone.

    python benchmarks/busy_neighbour.py [--server 'pagemesh serve --port {port}']

The neighbour is two processes (`--neighbours`) that compute without end. Quiet and busy runs
alternate on one server, each with prompts of its own; the ratio is of the medians. Exits with 1
when a request failed, or when a ratio is below what is asked: 0.45 at 1 stream, 0.35 at 32.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Final

import msgspec
from parts.busy import busy_cores
from parts.served import Command, served

from pagemesh.bench.options import ServeOptions, output_file
from pagemesh.bench.serve import bench_serve

_OURS: Final = f"{sys.executable} -m pagemesh.cli serve --port {{port}}"


class Load(msgspec.Struct, frozen=True):
    """`n_requests` per run, of 128 tokens in and out; `least` is the ratio asked for."""

    streams: int
    n_requests: int
    least: float


LOADS: Final = (Load(1, 2, 0.45), Load(32, 64, 0.35))


@dataclass(slots=True)
class Outcome:
    """Output tokens per second of each run, and the requests that failed in all of them."""

    quiet: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    failed: int = 0

    @property
    def ratio(self) -> float:
        return median(self.busy) / median(self.quiet)


def measure(url: str, load: Load, args: argparse.Namespace, seeds: Iterator[int]) -> Outcome:
    outcome = Outcome()
    for _ in range(args.rounds):
        for rates, neighbours in ((outcome.quiet, 0), (outcome.busy, args.neighbours)):
            with busy_cores(neighbours):
                summary = bench_serve(_options(url, load, next(seeds))).summary
            rates.append(summary.per_s(summary.output_tokens))
            outcome.failed += summary.failed
    return outcome


def _options(url: str, load: Load, seed: int) -> ServeOptions:
    return ServeOptions(
        base_url=url,
        num_prompts=load.n_requests,
        max_concurrency=load.streams,
        random_input_len=128,
        random_output_len=128,
        ignore_eos=True,
        clients=1,
        seed=seed,
        vocab_size=49152,
    )


def line(load: Load, outcome: Outcome) -> str:
    return (
        f"{load.streams:3} streams: quiet {median(outcome.quiet):.1f} tok/s, "
        f"busy {median(outcome.busy):.1f} tok/s, ratio {outcome.ratio:.2f} "
        f"(at least {load.least:.2f}), {outcome.failed} requests failed"
    )


def as_json(load: Load, outcome: Outcome) -> dict[str, object]:
    return {
        "streams": load.streams,
        "quiet_tok_s": outcome.quiet,
        "busy_tok_s": outcome.busy,
        "ratio": outcome.ratio,
        "failed": outcome.failed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", default=_OURS, metavar="COMMAND", help="with {port} in it")
    parser.add_argument("--neighbours", type=int, default=2, help="busy loops")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--start-timeout-s", type=float, default=600.0)
    parser.add_argument("--json", type=output_file, metavar="FILE")
    args = parser.parse_args()
    command, seeds = Command("server", args.server), count()
    outcomes: list[tuple[Load, Outcome]] = []
    with (
        tempfile.TemporaryDirectory(prefix="busy-neighbour-") as folder,
        served(command, Path(folder) / "server.log", args.start_timeout_s) as server,
    ):
        for load in LOADS:
            outcomes.append((load, measure(server.url, load, args, seeds)))
            print(line(*outcomes[-1]), flush=True)
    if args.json is not None:
        figures = [as_json(load, outcome) for load, outcome in outcomes]
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)))
    met = all(o.failed == 0 and o.ratio >= load.least for load, o in outcomes)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())

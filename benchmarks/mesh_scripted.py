"""What the mesh costs a token: real gateway, tokenizer and scheduler processes, a scripted worker.

    python benchmarks/mesh_scripted.py single [--busy]       one stream, a step takes 5 ms
    python benchmarks/mesh_scripted.py streams               256 streams at several rates of tokens
    python benchmarks/mesh_scripted.py scale --json FILE     more gateways and tokenizer services

`single` follows each token through the processes. `streams` lets the worker make tokens at each
`--rate` (0: as fast as it can) and prints what arrived, in how many events, and the CPU time of
each process per token. `scale` asks for more than one gateway can carry: at each number of
`--gateways` with the number of `--tokenizers` at the same place, long and then short answers.
Run `pagemesh prepare` once before.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec
from parts.busy import busy_cores
from parts.client import Counts, Load
from parts.count import count
from parts.hops import Way, read_way
from parts.mesh import Mesh, running_mesh
from parts.scale import Demand, Row, Shape, head_lines, row_line, rows

from pagemesh.bench.environment import environment

DEFAULT_RATES: Final = (20_000, 40_000, 60_000, 80_000, 100_000, 0)
FEW_TOKENS: Final = 20


async def follow(args: argparse.Namespace) -> Way:
    with tempfile.TemporaryDirectory() as name:
        trace = Path(name)
        async with running_mesh(args.step_ms / 1e3, 1, trace) as mesh:
            load = Load(url=mesh.url, streams=1, tokens=args.tokens, reader=args.reader)
            with busy_cores(os.cpu_count() or 1 if args.busy else 0):
                counts = await count(load)
        return read_way(trace, counts.event_s)


def run_single(args: argparse.Namespace) -> None:
    way = asyncio.run(follow(args))
    print(f"one stream, steps of {args.step_ms:g} ms{', every core busy' * args.busy}")
    print(f"the mesh adds {way.added_on_average():.3f} ms a token (TPOT less the step)")
    print(f"{'milliseconds':58}     p50     p99")
    for name, spread in way.hops().items():
        print(f"  {name:56} {spread}")
    print(f"{'end of the step to the client':58} {way.whole()}")
    print(f"{'pause of the worker between two steps':58} {way.pauses()}")
    print(f"{'time between two tokens less the step':58} {way.added()}")


async def measure(args: argparse.Namespace, rate: int) -> None:
    """One line: what came through when the worker makes `rate` tokens a second.

    Requests cost something too, so CPU times are the difference to a run of few tokens; a first
    such run warms everything up.
    """
    step_s = args.streams / rate if rate else 0.0
    async with running_mesh(step_s, args.streams) as mesh:
        load = Load(url=mesh.url, streams=args.streams, tokens=FEW_TOKENS, reader=args.reader)
        await spend(mesh, load)
        _, few_cpu_s = await spend(mesh, load)
        load = msgspec.structs.replace(load, tokens=args.tokens)
        counts, cpu_s = await spend(mesh, load)
    n_tokens = args.streams * args.tokens
    more_tokens = n_tokens - args.streams * FEW_TOKENS
    cpu_us = {name: (cpu_s[name] - few_cpu_s[name]) / more_tokens * 1e6 for name in cpu_s}
    shares = "  ".join(f"{name} {us:.2f}" for name, us in cpu_us.items())
    print(
        f"{rate or 'no':>8} limit: {n_tokens / (counts.last_s - counts.first_s):8.0f} tokens/s, "
        f"{counts.events / n_tokens:.3f} events a token; CPU µs a token: {shares}, "
        f"together {sum(cpu_us.values()):.2f}",
        flush=True,
    )


async def spend(mesh: Mesh, load: Load) -> tuple[Counts, dict[str, float]]:
    """What came, and the CPU seconds of each process that it took."""
    before_s = mesh.cpu_s()
    counts = await count(load)
    spent_s = {name: after_s - before_s[name] for name, after_s in mesh.cpu_s().items()}
    return counts, {**spent_s, "client": counts.cpu_s}


def run_streams(args: argparse.Namespace) -> None:
    print(f"{args.streams} streams of {args.tokens} tokens, {args.reader} client")
    for rate in args.rates:
        asyncio.run(measure(args, rate))


async def measure_scale(args: argparse.Namespace) -> None:
    """The file is written anew with every row: a run may be cut off."""
    shapes = map(Shape, args.gateways, args.tokenizers)
    demand = Demand(args.streams, args.clients, args.seconds, args.tokens, args.rate)
    where = {"demand": demand._asdict(), "cores": os.cpu_count(), "environment": environment()}
    measured: list[Row] = []
    async for row in rows(shapes, demand):
        print(row_line(row), flush=True)
        measured.append(row)
        if args.json is not None:
            encoded = msgspec.json.encode({"rows": measured, **where})
            args.json.write_bytes(msgspec.json.format(encoded, indent=1))


def run_scale(args: argparse.Namespace) -> None:
    print(f"{args.streams} streams at a time from {args.clients} clients, {args.seconds:g} s each")
    print(*head_lines(), sep="\n", flush=True)
    asyncio.run(measure_scale(args))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    modes = parser.add_subparsers(dest="mode", required=True)
    single = modes.add_parser("single", help="one stream, hop by hop")
    single.add_argument("--step-ms", type=float, default=5.0)
    single.add_argument("--tokens", type=int, default=1000)
    single.add_argument("--busy", action="store_true", help="beside a busy loop on every core")
    single.set_defaults(run=run_single)
    streams = modes.add_parser("streams", help="many streams, by rate")
    streams.add_argument("--streams", type=int, default=256)
    streams.add_argument("--tokens", type=int, default=1000)
    streams.add_argument("--rates", type=int, nargs="+", default=list(DEFAULT_RATES))
    streams.set_defaults(run=run_streams)
    add_scale(modes)
    for mode in (single, streams):
        mode.add_argument("--reader", choices=("raw", "aiohttp"), default="raw")
    args = parser.parse_args()
    if args.mode == "scale" and len(args.gateways) != len(args.tokenizers):
        parser.error("--gateways and --tokenizers take as many numbers each")
    return args


def add_scale(modes: Any) -> None:
    scale = modes.add_parser("scale", help="more gateways and tokenizer services")
    scale.add_argument("--gateways", type=int, nargs="+", default=[1, 2, 1, 2, 4])
    scale.add_argument("--tokenizers", type=int, nargs="+", default=[1, 1, 2, 2, 4])
    scale.add_argument("--streams", type=int, default=512, help="requests at a time")
    scale.add_argument("--clients", type=int, default=4, help="client processes")
    scale.add_argument("--seconds", type=float, default=4.0, help="for each row")
    scale.add_argument("--tokens", type=int, nargs="+", default=[256, 16], help="of an answer")
    scale.add_argument("--rate", type=int, default=0, help="tokens/s of the worker; 0: its most")
    scale.add_argument("--json", type=Path, help="write every figure to this file")
    scale.set_defaults(run=run_scale)


def main() -> None:
    args = parse()
    args.run(args)


if __name__ == "__main__":
    main()

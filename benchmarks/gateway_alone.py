"""The gateway alone: what one core of it carries, with everything below it scripted.

    python benchmarks/gateway_alone.py [--gateways 1 2 4] [--json FILE]

A real gateway process with real links to a scripted tokenizer service; `wrk`, which only counts
bytes, asks (Debian: apt-get install wrk; without it processes of ours do, see --tool). First what
event loop, HTTP library and kernel take with nothing around them, then short answers as fast as
they come, then streams at each of `--rates`. Connections, streams and rates are for each gateway.
Where there are cores enough, each gateway has one to itself. `per CPU s` is what a core carries:
units by the gateways' CPU time. No model is needed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import msgspec
from parts.drive import default_tool
from parts.gateway_rows import Demand, Row, floors, head_line, requests_row, row_line, streams_row

from pagemesh.bench.environment import environment

DEFAULT_RATES: Final = (40_000, 80_000)


async def rows(args: argparse.Namespace) -> AsyncIterator[Row]:
    demand = Demand(args.seconds, args.connections, args.streams, args.tool, args.log_level)
    if not args.no_floors:
        async for row in floors(demand):
            yield row
    for gateways in args.gateways:
        yield await requests_row(demand, gateways)
        for rate in args.rates:
            yield await streams_row(demand, gateways, rate)


async def measure(args: argparse.Namespace) -> None:
    """The file is written anew with every row: a run may be cut off."""
    where = {"cores": os.cpu_count(), "tool": args.tool, "environment": environment()}
    measured: list[Row] = []
    print(head_line(), flush=True)
    async for row in rows(args):
        print(row_line(row), flush=True)
        measured.append(row)
        if args.json is not None:
            encoded = msgspec.json.encode({"rows": measured, **where})
            args.json.write_bytes(msgspec.json.format(encoded, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gateways", type=int, nargs="+", default=[1])
    parser.add_argument("--rates", type=int, nargs="*", default=list(DEFAULT_RATES))
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--connections", type=int, default=64, help="that ask for short answers")
    parser.add_argument("--seconds", type=int, default=6, help="for each row")
    parser.add_argument("--log-level", default="info", help="of the gateways; a line a request")
    parser.add_argument("--tool", choices=("wrk", "ours"), default=default_tool())
    parser.add_argument("--no-floors", action="store_true")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(measure(parse()))

"""A mesh that is hurt again and again, under load: what do its clients notice, and is all there?

    python benchmarks/chaos.py scripted            answers anybody can check, any number of streams
    python benchmarks/chaos.py real                the real model in float32, greedy

Two gateways, tokenizer services, schedulers and workers, and Redis; each in a network namespace of
its own where that is permitted. Every fault of every service comes in turn: see parts/chaos_faults.
The exit code is 1 if a client was told anything wrong, if a request failed anywhere, if the books
of a service do not add up, or if a pause is longer than `--max-pause-s`.
Run `pagemesh prepare` once before.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import uvloop
from parts.chaos_asks import Asks, RealAsks, ScriptedAsks
from parts.chaos_client import Clients
from parts.chaos_faults import FREED_S, Fault, Noticed, Tormentor, all_faults, rounds
from parts.chaos_mesh import ChaosMesh, chaos_mesh
from parts.conservation import Bookkeeper
from parts.netns import Network, network, why_not

from pagemesh.shared.settings import (
    CacheSettings,
    GatewaySettings,
    LogSettings,
    MeshSettings,
    ModelSettings,
    SchedulerSettings,
    Settings,
)

# Streams of a gateway must end at it; those of the others may go on elsewhere, and shall.
DRAIN_S: Final = 3.0
ASKED_EVERY_S: Final = 1.0
WARM_S: Final = 3.0
END_S: Final = 60.0


def settings_of(args: argparse.Namespace) -> Settings:
    return Settings(
        model=ModelSettings(max_model_len=2048, dtype="float32"),
        cache=CacheSettings(kv_cache_memory=256 * 2**20),
        scheduler=SchedulerSettings(max_num_seqs=256 if args.mode == "scripted" else 32),
        gateway=GatewaySettings(allow_unauthenticated=True),
        mesh=MeshSettings(
            mesh_secret="chaos",
            gateways=2,
            tokenizers=2,
            schedulers=2,
            workers=2,
            drain_timeout_s=DRAIN_S,
        ),
        log=LogSettings(log_level="info", log_format="json"),
    )


async def run(args: argparse.Namespace, net: Network | None) -> list[str]:
    """What was off."""
    settings = settings_of(args)
    step_s = args.step_ms / 1e3 if args.mode == "scripted" else None
    async with chaos_mesh(settings, net, args.log, step_s=step_s) as mesh:
        asks = ScriptedAsks(settings) if args.mode == "scripted" else RealAsks(args.streams)
        await asks.prepare(mesh.urls("gateway")[0])
        print(f"{args.streams} streams; {asks.about}", flush=True)
        return await hurt(args, mesh, asks)


async def hurt(args: argparse.Namespace, mesh: ChaosMesh, asks: Asks) -> list[str]:
    clients, keeper = Clients(mesh.urls("gateway"), asks.next), Bookkeeper(mesh)
    tormentor = Tormentor(mesh, clients, keeper)
    asking = asyncio.create_task(clients.run(args.streams))
    keeping = asyncio.create_task(keeper.keep(ASKED_EVERY_S))
    await asyncio.sleep(WARM_S)
    noticed: list[Noticed] = []
    end_s = time.monotonic() + args.seconds
    for round_number, fault in rounds(faults_of(args, mesh)):
        if round_number > 0 and time.monotonic() > end_s:
            break
        noticed.append(await tormentor.inflict(fault))
        print(noticed[-1].line(), flush=True)
    clients.stop()
    await asyncio.wait_for(asking, END_S)
    keeping.cancel()
    await keeper.ask_all()
    return told(args, clients, keeper, noticed)


def told(
    args: argparse.Namespace, clients: Clients, keeper: Bookkeeper, noticed: list[Noticed]
) -> list[str]:
    """Print what came, and return what was off."""
    tally = clients.tally
    print(
        f"\n{tally.asked} requests: {tally.right} answered as they must be, {tally.tokens} tokens, "
        f"{len(tally.wrong)} not, {len(tally.errors)} errors; {tally.broken} ended with their "
        f"gateway, {tally.turned_away} times asked another\n"
    )
    living = keeper.living()
    print("\n".join(keeper.books.table(living)))
    return [
        *tally.wrong[:5],
        *tally.errors[:5],
        *keeper.books.problems[:5],
        *keeper.books.left_over(living),
        *(f"too long: {each.line()}" for each in noticed if is_slow(each, args.max_pause_s)),
    ]


def is_slow(noticed: Noticed, max_pause_s: float) -> bool:
    """A gateway's clients have no other way to it: their pause is as long as it is away."""
    if noticed.fault.service == "gateway":
        return noticed.freed_s is not None and noticed.freed_s > FREED_S
    return noticed.pause_s > max_pause_s


def faults_of(args: argparse.Namespace, mesh: ChaosMesh) -> list[Fault]:
    possible = all_faults(can_cut=mesh.can_cut)
    return [fault for fault in args.faults if fault in possible] if args.faults else possible


def fault_of(text: str) -> Fault:
    fault = Fault(*text.split(":", 1))
    if fault not in all_faults(can_cut=True):
        raise argparse.ArgumentTypeError(f"{text} is none of those in parts/chaos_faults")
    return fault


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=("scripted", "real"))
    parser.add_argument("--streams", type=int, help="clients at a time (200, real: 24)")
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="begin again until then; 0: once round"
    )
    parser.add_argument("--faults", nargs="+", type=fault_of, help="KIND:SERVICE …; all")
    parser.add_argument("--step-ms", type=float, default=50.0, help="of the scripted workers")
    parser.add_argument("--max-pause-s", type=float, default=3.0)
    parser.add_argument("--log", type=Path, help="what the services say goes there")
    args = parser.parse_args()
    args.streams = args.streams or (200 if args.mode == "scripted" else 24)
    return args


def main() -> int:
    args = parse()
    with ExitStack() as stack:
        if args.log is None:
            args.log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "mesh.log"
        reason = why_not()
        net = None
        if reason is None:
            net = stack.enter_context(network())
            stack.enter_context(net.hub.entered())
        else:
            print(f"no network is cut: {reason}")
        off = uvloop.run(run(args, net))
    print("\n".join(["", *(f"OFF: {each}" for each in off)] if off else ["", "nothing is off"]))
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())

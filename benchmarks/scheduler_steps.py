"""Steps a second of the scheduler service over its real links, beside what a device allows.

    python benchmarks/scheduler_steps.py [--rows 64 256] [--step-ms 1] [--seconds 10]

Three processes: the scheduler service as `pagemesh scheduler` runs it, a worker whose device takes
`step-ms` for a step, and this one, which stands for a tokenizer service: it keeps `rows` requests
running and reads every token. The worker has the first core for itself, the other two share the
second. Prints the step rate, the share of the device's time that is used, the rate of the best 50
steps in a row, the gaps between steps, and the CPU time of the scheduler and of this process for
each step.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from statistics import quantiles
from typing import Final, NamedTuple

import aiohttp
import psutil
import uvloop
from parts import device
from parts.services import python_path, service_processes, supervised

from pagemesh.children import service_spec
from pagemesh.shared.engine_messages import Submit, Tokens
from pagemesh.shared.hashing import chain_hashes
from pagemesh.shared.link import Link, dial
from pagemesh.shared.messages import Engines, Hello
from pagemesh.shared.registry import Registry
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.settings import LogSettings, MeshSettings, SchedulerSettings, Settings
from pagemesh.shared.wire import PROTOCOL, pack_ids, unpack_ids
from pagemesh.supervisor import ChildSpec

PROMPT_TOKENS: Final = (64, 192)
ANSWER_TOKENS: Final = (300, 500)
WARM_UP_S: Final = 2.0
WINDOW_STEPS: Final = 50


class Measured(NamedTuple):
    """`gaps_s` between the frames of neighbouring steps; CPU seconds over the whole run."""

    gaps_s: list[float]
    tokens: int
    elapsed_s: float
    scheduler_cpu_s: float
    own_cpu_s: float


class Client:
    """Stands for a tokenizer service with `rows` requests on one engine at all times."""

    def __init__(self, link: Link, rows: int) -> None:
        self._link = link
        self._rows = rows
        self._random = random.Random(0)
        self._keys = 0
        self.tokens = 0

    async def measure(self, seconds: float, scheduler: psutil.Process) -> Measured:
        times: list[float] = []
        begin = end = self._spent(scheduler)
        begin_tokens, start_s = 0, time.perf_counter() + WARM_UP_S
        async for message in self._link:
            now_s = time.perf_counter()
            if isinstance(message, Engines) and message.engines and not self._keys:
                for _ in range(self._rows):
                    self._submit(message.engines[0].engine_id)
            if not isinstance(message, Tokens):
                continue
            self._take(message)
            if now_s < start_s:
                continue
            if not times:
                gc.collect()
                gc.freeze()
                begin, begin_tokens = self._spent(scheduler), self.tokens
            times.append(now_s)
            if now_s >= start_s + seconds:
                break
        end = self._spent(scheduler)
        gaps_s = [later - earlier for earlier, later in pairwise(times)]
        spent = [after - before for before, after in zip(begin, end, strict=True)]
        return Measured(gaps_s, self.tokens - begin_tokens, times[-1] - times[0], *spent)

    def _take(self, tokens: Tokens) -> None:
        unpack_ids(tokens.keys)
        self.tokens += len(unpack_ids(tokens.ids))
        for _ in tokens.ended:
            self._submit(tokens.engine_id)

    def _submit(self, engine_id: str) -> None:
        self._keys += 1
        n = self._random.randint(*PROMPT_TOKENS)
        prompt = pack_ids(self._random.choices(range(3, device.CARD.vocab_tokens), k=n))
        hashes = b"".join(chain_hashes(prompt, device.CARD.block_tokens))
        params = SamplingParams(
            max_tokens=self._random.randint(*ANSWER_TOKENS), ignore_eos=True, temperature=0.0
        )
        name = f"r{self._keys}"
        self._link.send(Submit(self._keys, name, 0, engine_id, prompt, b"", 0, params, hashes))

    @staticmethod
    def _spent(scheduler: psutil.Process) -> tuple[float, float]:
        spent = scheduler.cpu_times()
        return spent.user + spent.system, time.process_time()


@asynccontextmanager
async def running(rows: int, step_s: float) -> AsyncIterator[tuple[Link, psutil.Process]]:
    """A link to a scheduler with such a worker, and the scheduler's process."""
    asked = Settings(
        scheduler=SchedulerSettings(max_num_seqs=rows),
        mesh=MeshSettings(mesh_secret="benchmark"),
        log=LogSettings(log_level="error", log_format="human"),
    )
    async with supervised(asked) as (settings, supervisor):
        supervisor.start(_device_spec(settings, step_s))
        supervisor.start(service_spec("scheduler", settings))
        address = await _address(settings.mesh)
        processes = service_processes(("worker", "scheduler"))
        _pin(processes)
        async with aiohttp.ClientSession() as session:
            link = await dial(session, address, _hello(settings))
            try:
                yield link, processes["scheduler"]
            finally:
                await link.close()


def _device_spec(settings: Settings, step_s: float) -> ChildSpec:
    spec = service_spec("worker", settings)
    environ = {**spec.environ, "PYTHONPATH": python_path(), device.STEP_S: str(step_s)}
    command = (sys.executable, "-m", "parts.device", "worker")
    return spec._replace(command=command, environ=environ)


def _hello(settings: Settings) -> Hello:
    return Hello(PROTOCOL, "tokenizer", "client", 1, settings.mesh.mesh_secret)


async def _address(mesh: MeshSettings) -> str:
    assert mesh.redis_url is not None
    registry = Registry(mesh.redis_url, mesh.mesh_name)
    try:
        async for instances in registry.watch("scheduler"):
            if instances:
                return instances[0].address
    finally:
        await registry.close()
    raise RuntimeError("no scheduler has come up")


def _pin(processes: dict[str, psutil.Process]) -> None:
    """The worker to the first core, the rest to the second."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return
    processes["worker"].cpu_affinity(cores[:1])
    for process in (processes["scheduler"], psutil.Process()):
        process.cpu_affinity(cores[1:2])


def best_rate(gaps_s: list[float]) -> float:
    """Steps a second over the best run of WINDOW_STEPS: what a machine with neighbours allows."""
    starts = range(0, len(gaps_s) - WINDOW_STEPS + 1, WINDOW_STEPS)
    return max((WINDOW_STEPS / sum(gaps_s[i : i + WINDOW_STEPS]) for i in starts), default=0.0)


async def measure(rows: int, step_s: float, seconds: float) -> None:
    affinity = os.sched_getaffinity(0)
    async with running(rows, step_s) as (link, scheduler):
        measured = await Client(link, rows).measure(seconds, scheduler)
    os.sched_setaffinity(0, affinity)
    steps = len(measured.gaps_s)
    rate = steps / measured.elapsed_s
    p50, p99 = (quantiles(measured.gaps_s, n=100)[at] * 1e3 for at in (49, 98))
    print(
        f"{rows:5} rows: {rate:.0f} steps/s, {rate * step_s:.0%} of the device "
        f"(best {best_rate(measured.gaps_s):.0f}), "
        f"{measured.tokens / measured.elapsed_s / 1e3:.0f}k tokens/s; "
        f"gap p50 {p50:.2f} ms, p99 {p99:.2f}, worst {max(measured.gaps_s) * 1e3:.1f}; "
        f"CPU a step: scheduler {measured.scheduler_cpu_s / steps * 1e3:.3f} ms, "
        f"client {measured.own_cpu_s / steps * 1e3:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--step-ms", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    for rows in args.rows:
        uvloop.run(measure(rows, args.step_ms / 1e3, args.seconds))


if __name__ == "__main__":
    main()

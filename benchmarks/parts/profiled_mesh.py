"""A whole mesh whose worker's steps are traced, under the load of `pagemesh bench serve`.

A task has a load of its own, of streams that could go on for as long as the model's length allows;
it is cut off as soon as the worker has seen what it wants.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp
import msgspec
import psutil

from pagemesh.children import service_spec
from pagemesh.prepare import prepare
from pagemesh.shared.settings import Settings
from pagemesh.supervisor import ChildSpec, first
from parts import traced_worker
from parts.cpu_time import cpu_s
from parts.load_command import load_command
from parts.mesh import SERVICES
from parts.services import POLL_S, free_port, python_path, service_processes, supervised
from parts.step_notes import Failed, Outcome, PlainSteps, Task
from parts.traced_worker import Order, Plan, Standing

_READY_TIMEOUT_S: Final = 400.0
_ANSWER_S: Final = 30.0
"""Beyond the patience of an order: reading a trace takes its time."""
_CPU_WINDOW_S: Final = 1.0
"""The system counts CPU time in hundredths of a second."""
_LONGEST_LEAD_TOKENS: Final = 256
"""Streams come one after the other while the first decode already: a token of lead for each row,
up to this many, and both rounds of a batch begin at the same mean context."""
_STREAMS_EACH: Final = 4
"""One that reaches the model's length is replaced, so that short models last too."""
_MOST_CLIENTS: Final = 4

Show = Callable[[Task, Outcome], None]


class Observation(NamedTuple):
    """How tasks are watched: under requests of `context` prompt tokens, for `patience_s` at most
    each. Traces lie in `folder` while they are read; with `keep` they stay there."""

    context: int
    patience_s: float
    folder: Path
    keep: bool


class Load(NamedTuple):
    process: Process
    log: Path


class ProfiledMesh(NamedTuple):
    """`processes` by service."""

    url: str
    worker_url: str
    processes: dict[str, psutil.Process]

    def cpu_s(self) -> dict[str, float]:
        """User and system seconds of each service until now."""
        return cpu_s(self.processes)

    async def watch(self, order: Order) -> Outcome:
        body = msgspec.json.encode(order)
        timeout = aiohttp.ClientTimeout(total=order.patience_s + _ANSWER_S)
        try:
            async with (
                aiohttp.ClientSession(self.worker_url, timeout=timeout) as session,
                session.post(traced_worker.WATCH_PATH, data=body) as answer,
            ):
                answer.raise_for_status()
                outcome: Outcome = msgspec.json.decode(await answer.read(), type=Outcome)
                return outcome
        except (TimeoutError, aiohttp.ClientError) as error:
            return Failed(f"the worker did not answer: {error!r}", "no trace")

    async def standing(self) -> Standing:
        async with (
            aiohttp.ClientSession(self.worker_url) as session,
            session.get(traced_worker.STANDING_PATH) as answer,
        ):
            answer.raise_for_status()
            return msgspec.json.decode(await answer.read(), type=Standing)


async def profile_mesh(
    settings: Settings, tasks: list[Task], how: Observation, show: Show
) -> dict[Task, Outcome]:
    """Every task's outcome, each shown when it is there."""
    prepare(settings.model)
    outcomes: dict[Task, Outcome] = {}
    async with _running(settings, how) as mesh:
        for seed, task in enumerate(tasks):
            outcomes[task] = await _observed(mesh, task, seed, how)
            show(task, outcomes[task])
    return outcomes


@asynccontextmanager
async def _running(settings: Settings, how: Observation) -> AsyncIterator[ProfiledMesh]:
    mesh = msgspec.structs.replace(settings.mesh, mesh_secret="benchmark")
    gateway = msgspec.structs.replace(settings.gateway, port=free_port())
    settings = msgspec.structs.replace(settings, mesh=mesh, gateway=gateway)
    plan = Plan(free_port(), str(how.folder), how.keep)
    async with supervised(settings) as (settings, supervisor):
        for service in SERVICES:
            supervisor.start(_spec(service, settings, plan))
        url = f"http://127.0.0.1:{gateway.port}"
        await first(supervisor.watch(), _until_ready(url))
        supervisor.mark_ready()
        worker_url = f"http://{mesh.service_host}:{plan.port}"
        yield ProfiledMesh(url, worker_url, service_processes(SERVICES))


async def _until_ready(url: str) -> None:
    """Raises TimeoutError."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(_READY_TIMEOUT_S):
        while True:
            try:
                async with session.get(f"{url}/ready") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(POLL_S)


def _spec(service: str, settings: Settings, plan: Plan) -> ChildSpec:
    spec = service_spec(service, settings)
    if service != "worker":
        return spec
    environ = {
        **spec.environ,
        "PYTHONPATH": python_path(),
        traced_worker.PLAN: msgspec.json.encode(plan).decode(),
    }
    command = (sys.executable, "-m", "parts.traced_worker", service)
    return spec._replace(command=command, environ=environ)


async def _observed(mesh: ProfiledMesh, task: Task, seed: int, how: Observation) -> Outcome:
    """The order comes before the load, so that the worker sees every stream of it begin."""
    standing = await mesh.standing()
    n_tokens = standing.max_model_len - how.context
    lead_tokens = min(task.rows, _LONGEST_LEAD_TOKENS, n_tokens // 2)
    watching = asyncio.create_task(
        mesh.watch(Order(task, how.context + lead_tokens, how.patience_s))
    )
    flags = _load_flags(mesh.url, task.rows, how.context, n_tokens) | {
        "vocab-size": standing.vocab_tokens,
        "seed": seed,
    }
    async with _loading(flags, how.folder / f"load-{task.name}.log") as load:
        outcome = await _unless_it_fails(load, watching)
        if isinstance(outcome, PlainSteps):
            outcome.services_cpu_ms = await _cpu_ms(mesh)
    return outcome


async def _unless_it_fails(load: Load, watching: asyncio.Task[Outcome]) -> Outcome:
    """A load that has come to its end may have been seen in time."""
    ending = asyncio.create_task(load.process.wait())
    await asyncio.wait({watching, ending}, return_when=asyncio.FIRST_COMPLETED)
    if load.process.returncode:
        watching.cancel()
        return Failed("the load failed", str(load.log))
    return await watching


def _load_flags(url: str, rows: int, context: int, n_tokens: int) -> dict[str, object]:
    """`rows` streams at a time."""
    return {
        "base-url": url,
        "num-prompts": rows * _STREAMS_EACH,
        "max-concurrency": rows,
        "random-input-len": context,
        "random-output-len": n_tokens,
        "num-warmups": 0,
        "clients": min(rows, _MOST_CLIENTS),
    }


async def _cpu_ms(mesh: ProfiledMesh) -> dict[str, float]:
    """CPU time of each service for a token of the batch that is decoded now."""
    before_s, before = mesh.cpu_s(), await mesh.standing()
    await asyncio.sleep(_CPU_WINDOW_S)
    spent_s = {name: s - before_s[name] for name, s in mesh.cpu_s().items()}
    n_tokens = (await mesh.standing()).n_rows - before.n_rows
    return {name: s / n_tokens * 1e3 for name, s in spent_s.items() if n_tokens}


@asynccontextmanager
async def _loading(flags: dict[str, object], log: Path) -> AsyncIterator[Load]:
    """The load at work, with its client processes; on leaving they are gone."""
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *load_command(flags),
            stdin=DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield Load(process, log)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

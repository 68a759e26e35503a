"""A whole mesh whose worker's steps are traced, under the load of `pagemesh bench serve`."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import psutil

from pagemesh.children import service_spec
from pagemesh.prepare import prepare
from pagemesh.shared.settings import Settings
from pagemesh.supervisor import ChildSpec, first
from parts import traced_worker
from parts.mesh import SERVICES, until_ready
from parts.services import POLL_S, free_port, python_path, service_processes, supervised
from parts.traced_runner import Failed, Outcome, PlainSteps, Task

_READY_TIMEOUT_S: Final = 400.0
_OUTCOME_TIMEOUT_S: Final = 15.0
_SPARE_TOKENS: Final = 384
"""Requests come one after the other, so the first to come are the first to end."""
_MOST_CLIENTS: Final = 4


class ProfiledMesh(NamedTuple):
    """`processes` by service."""

    url: str
    processes: dict[str, psutil.Process]

    def cpu_s(self) -> dict[str, float]:
        """User and system seconds of each service until now."""
        times = {name: process.cpu_times() for name, process in self.processes.items()}
        return {name: spent.user + spent.system for name, spent in times.items()}


async def profile_mesh(
    settings: Settings, tasks: list[Task], context: int, folder: Path, *, keep: bool
) -> dict[Task, Outcome]:
    """Every task's outcome, which the worker also writes to `folder`. Requests have `context`
    prompt tokens."""
    prepare(settings.model)
    outcomes: dict[Task, Outcome] = {}
    async with _running(settings, traced_worker.Plan(tasks, str(folder), keep)) as mesh:
        for seed, task in enumerate(tasks):
            mesh.processes["worker"].send_signal(signal.SIGUSR1)
            before_s, n_tokens = mesh.cpu_s(), task.steps + _SPARE_TOKENS
            await _load(mesh.url, task.rows, context, n_tokens, seed)
            spent_s = {name: s - before_s[name] for name, s in mesh.cpu_s().items()}
            path = traced_worker.outcome_file(folder, task)
            outcomes[task] = await asyncio.to_thread(_outcome, path)
            if isinstance(outcome := outcomes[task], PlainSteps):
                outcome.services_cpu_ms = {name: s / n_tokens * 1e3 for name, s in spent_s.items()}
    return outcomes


@asynccontextmanager
async def _running(settings: Settings, plan: traced_worker.Plan) -> AsyncIterator[ProfiledMesh]:
    mesh = msgspec.structs.replace(settings.mesh, mesh_secret="benchmark")
    gateway = msgspec.structs.replace(settings.gateway, port=free_port())
    settings = msgspec.structs.replace(settings, mesh=mesh, gateway=gateway)
    async with supervised(settings) as (settings, supervisor):
        for service in SERVICES:
            supervisor.start(_spec(service, settings, plan))
        url = f"http://127.0.0.1:{gateway.port}"
        await first(supervisor.watch(), until_ready(url, _READY_TIMEOUT_S))
        supervisor.mark_ready()
        yield ProfiledMesh(url, service_processes(SERVICES))


def _spec(service: str, settings: Settings, plan: traced_worker.Plan) -> ChildSpec:
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


async def _load(url: str, rows: int, context: int, n_tokens: int, seed: int) -> None:
    """`rows` streams at once. Raises RuntimeError when one fails."""
    flags = {
        "base-url": url,
        "num-prompts": rows,
        "max-concurrency": rows,
        "random-input-len": context,
        "random-output-len": n_tokens,
        "seed": seed,
        "num-warmups": 0,
        "clients": min(rows, _MOST_CLIENTS),
    }
    argv = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pagemesh.cli", "bench", "serve", "--ignore-eos", *argv),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"the load failed:\n{output.decode(errors='replace')}")


def _outcome(path: Path) -> Outcome:
    """The worker may still be reading its trace."""
    deadline_s = time.monotonic() + _OUTCOME_TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            return Failed("too few steps of exactly that many rows came in a row", "no trace")
        time.sleep(POLL_S)
    outcome: Outcome = msgspec.json.decode(path.read_bytes(), type=Outcome)
    return outcome

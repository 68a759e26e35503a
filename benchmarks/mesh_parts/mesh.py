"""A whole mesh whose worker is scripted, started with the pieces of `pagemesh serve`."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import psutil

from mesh_parts import probe, scripted_worker
from pagemesh.children import line_writer, service_spec
from pagemesh.embedded_valkey import embedded_valkey
from pagemesh.shared.settings import (
    GatewaySettings,
    LogSettings,
    MeshSettings,
    SchedulerSettings,
    Settings,
)
from pagemesh.supervisor import ChildSpec, Supervisor

BENCHMARKS: Final = Path(__file__).parents[1]
# Plain ASCII: a token that is half a character makes no event.
TEXT_FILE: Final = BENCHMARKS.parent / "LICENSE"
SERVICES: Final = ("worker", "scheduler", "tokenizer", "gateway")
READY_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.05


class Mesh(NamedTuple):
    """A running mesh, ready. `pids` by service."""

    url: str
    pids: dict[str, int]

    def cpu_s(self) -> dict[str, float]:
        """User and system seconds of each service until now."""
        times = {name: psutil.Process(pid).cpu_times() for name, pid in self.pids.items()}
        return {name: spent.user + spent.system for name, spent in times.items()}


@asynccontextmanager
async def running_mesh(step_s: float, max_num_seqs: int, trace: Path | None) -> AsyncIterator[Mesh]:
    """Steps take `step_s`. With a `trace` folder, every service writes its probe there at its end.

    The prepared folder of the default model must exist (`pagemesh prepare`).
    """
    with embedded_valkey() as valkey:
        settings = _settings(valkey.url, max_num_seqs)
        supervisor = Supervisor(line_writer(settings))
        supervisor.start(valkey.spec)
        try:
            # The services look for the registry once; starting them takes far longer than it does.
            await asyncio.sleep(0.5)
            for service in SERVICES:
                supervisor.start(_spec(service, settings, step_s, trace))
            url = f"http://127.0.0.1:{settings.gateway.port}"
            await _first(supervisor.watch(), _until_ready(url))
            supervisor.mark_ready()
            yield Mesh(url, _pids())
        finally:
            await supervisor.stop(grace_s=10.0)


def python_path() -> str:
    """Where a child of this process finds `mesh_parts`, and all that this process finds."""
    inherited = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(filter(None, (str(BENCHMARKS), inherited)))


def _settings(redis_url: str, max_num_seqs: int) -> Settings:
    with socket.create_server(("127.0.0.1", 0)) as probe_socket:
        port = int(probe_socket.getsockname()[1])
    return Settings(
        scheduler=SchedulerSettings(max_num_seqs=max_num_seqs),
        gateway=GatewaySettings(port=port),
        mesh=MeshSettings(redis_url=redis_url, mesh_secret="benchmark"),
        log=LogSettings(log_level="error", log_format="human"),
    )


def _spec(service: str, settings: Settings, step_s: float, trace: Path | None) -> ChildSpec:
    spec = service_spec(service, settings)
    environ = {
        **spec.environ,
        "PYTHONPATH": python_path(),
        scripted_worker.STEP_S: str(step_s),
        scripted_worker.TEXT: str(TEXT_FILE),
    }
    if trace is not None:
        environ[probe.FOLDER] = str(trace)
    return spec._replace(command=_command(service, spec, trace), environ=environ)


def _command(service: str, spec: ChildSpec, trace: Path | None) -> tuple[str, ...]:
    if service == "worker":
        return (sys.executable, "-m", "mesh_parts.scripted_worker", service)
    if trace is not None:
        return (sys.executable, "-m", "mesh_parts.traced_service", service)
    return spec.command


async def _first(*work: Coroutine[Any, Any, None]) -> None:
    """Wait for the first of `work`, cancel the rest, raise what it raised."""
    tasks = [asyncio.create_task(one) for one in work]
    done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    done.pop().result()


async def _until_ready(url: str) -> None:
    async with aiohttp.ClientSession() as session, asyncio.timeout(READY_TIMEOUT_S):
        while True:
            try:
                async with session.get(f"{url}/ready") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(_POLL_S)


def _pids() -> dict[str, int]:
    """The services among the children of this process: their name is their last argument."""
    children = psutil.Process().children(recursive=True)
    by_name = {child.cmdline()[-1]: child.pid for child in children}
    return {service: by_name[service] for service in SERVICES}

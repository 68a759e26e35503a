"""A whole mesh whose worker is scripted."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp
import psutil

from pagemesh.children import service_spec
from pagemesh.shared.settings import (
    GatewaySettings,
    LogSettings,
    MeshSettings,
    SchedulerSettings,
    Settings,
)
from pagemesh.supervisor import ChildSpec, first
from parts import probe, scripted_worker
from parts.cpu_time import cpu_s
from parts.services import (
    BENCHMARKS,
    POLL_S,
    free_port,
    python_path,
    service_processes,
    supervised,
)

# Plain ASCII: a token that is half a character makes no event.
TEXT_FILE: Final = BENCHMARKS.parent / "LICENSE"
SERVICES: Final = ("worker", "scheduler", "tokenizer", "gateway")
READY_TIMEOUT_S: Final = 30.0


class Mesh(NamedTuple):
    """A running mesh, ready. `processes` by service."""

    url: str
    processes: dict[str, psutil.Process]

    def cpu_s(self) -> dict[str, float]:
        """User and system seconds of each service until now."""
        return cpu_s(self.processes)


@asynccontextmanager
async def running_mesh(step_s: float, max_num_seqs: int, trace: Path | None) -> AsyncIterator[Mesh]:
    """Steps take `step_s`. With a `trace` folder, every service writes its probe there at its end.

    The prepared folder of the default model must exist (`pagemesh prepare`).
    """
    async with supervised(_settings(max_num_seqs)) as (settings, supervisor):
        for service in SERVICES:
            supervisor.start(_spec(service, settings, step_s, trace))
        url = f"http://127.0.0.1:{settings.gateway.port}"
        await first(supervisor.watch(), until_ready(url, READY_TIMEOUT_S))
        supervisor.mark_ready()
        yield Mesh(url, service_processes(SERVICES))


def _settings(max_num_seqs: int) -> Settings:
    port = free_port()
    return Settings(
        scheduler=SchedulerSettings(max_num_seqs=max_num_seqs),
        gateway=GatewaySettings(port=port),
        mesh=MeshSettings(mesh_secret="benchmark"),
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
        return (sys.executable, "-m", "parts.scripted_worker", service)
    if trace is not None:
        return (sys.executable, "-m", "parts.traced_service", service)
    return spec.command


async def until_ready(url: str, timeout_s: float) -> None:
    """Raises TimeoutError."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(timeout_s):
        while True:
            try:
                async with session.get(f"{url}/ready") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(POLL_S)

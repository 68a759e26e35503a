"""A whole mesh whose worker is scripted."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from pagemesh.children import service_specs
from pagemesh.readiness import wait_until_ready
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
    free_port,
    processes_by_service,
    python_path,
    supervised,
)

# Plain ASCII: a token that is half a character makes no event.
TEXT_FILE: Final = BENCHMARKS.parent / "LICENSE"
SERVICES: Final = ("worker", "scheduler", "tokenizer", "gateway")
READY_TIMEOUT_S: Final = 30.0


class Mesh(NamedTuple):
    """A running mesh, ready. `processes` by service."""

    url: str
    processes: dict[str, list[psutil.Process]]

    def cpu_s(self) -> dict[str, float]:
        """User and system seconds of each service until now."""
        return {service: sum(spent_s) for service, spent_s in self.cpu_s_of_each().items()}

    def cpu_s_of_each(self) -> dict[str, list[float]]:
        """Of each process."""
        return {
            service: list(cpu_s(dict(enumerate(processes))).values())
            for service, processes in self.processes.items()
        }


@asynccontextmanager
async def running_mesh(
    step_s: float,
    max_num_seqs: int,
    trace: Path | None = None,
    *,
    gateways: int = 1,
    tokenizers: int = 1,
) -> AsyncIterator[Mesh]:
    """Steps take `step_s`. With a `trace` folder, every service writes its probe there at its end.

    The prepared folder of the default model must exist (`pagemesh prepare`).
    """
    asked = _settings(max_num_seqs, gateways, tokenizers)
    async with supervised(asked) as (settings, supervisor):
        for service in SERVICES:
            specs = service_specs(service, settings)
            supervisor.start(*(_scripted(spec, service, step_s, trace) for spec in specs))
        await first(supervisor.watch(), _until_ready(settings))
        supervisor.mark_ready()
        url = f"http://127.0.0.1:{settings.gateway.port}"
        yield Mesh(url, processes_by_service(SERVICES))


def _settings(max_num_seqs: int, gateways: int, tokenizers: int) -> Settings:
    return Settings(
        scheduler=SchedulerSettings(max_num_seqs=max_num_seqs),
        gateway=GatewaySettings(port=free_port()),
        mesh=MeshSettings(mesh_secret="benchmark", gateways=gateways, tokenizers=tokenizers),
        log=LogSettings(log_level="error", log_format="human"),
    )


def _scripted(spec: ChildSpec, service: str, step_s: float, trace: Path | None) -> ChildSpec:
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


async def _until_ready(settings: Settings) -> None:
    """Raises TimeoutError."""
    async with asyncio.timeout(READY_TIMEOUT_S):
        await wait_until_ready(settings)

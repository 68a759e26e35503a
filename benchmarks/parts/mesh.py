"""A whole mesh whose worker is scripted."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
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
    workers: int = 1,
    max_num_batched_tokens: int | None = None,
    environ: Mapping[str, str] | None = None,
    modules: Mapping[str, str] | None = None,
) -> AsyncIterator[Mesh]:
    """Steps take `step_s`. With a `trace` folder, every service writes its probe there at its end.
    `environ` is for all of them; `modules` run in place of the services they are named by.

    The prepared folder of the default model must exist (`pagemesh prepare`).
    """
    asked = Settings(
        scheduler=SchedulerSettings(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        ),
        gateway=GatewaySettings(port=free_port()),
        mesh=MeshSettings(
            mesh_secret="benchmark", gateways=gateways, tokenizers=tokenizers, workers=workers
        ),
        log=LogSettings(log_level="error", log_format="human"),
    )
    named = {"worker": "parts.scripted_worker", **(modules or {})}
    async with supervised(asked) as (settings, supervisor):
        for service in SERVICES:
            specs = service_specs(service, settings)
            scripted = (_scripted(spec, service, step_s, trace, named) for spec in specs)
            supervisor.start(
                *(each._replace(environ={**each.environ, **(environ or {})}) for each in scripted)
            )
        await first(supervisor.watch(), _until_ready(settings))
        supervisor.mark_ready()
        url = f"http://127.0.0.1:{settings.gateway.port}"
        yield Mesh(url, processes_by_service(SERVICES))


def _scripted(
    spec: ChildSpec, service: str, step_s: float, trace: Path | None, modules: Mapping[str, str]
) -> ChildSpec:
    environ = {
        **spec.environ,
        "PYTHONPATH": python_path(),
        scripted_worker.STEP_S: str(step_s),
        scripted_worker.TEXT: str(TEXT_FILE),
    }
    if trace is not None:
        environ[probe.FOLDER] = str(trace)
    return spec._replace(command=_command(service, spec, trace, modules), environ=environ)


def _command(
    service: str, spec: ChildSpec, trace: Path | None, modules: Mapping[str, str]
) -> tuple[str, ...]:
    if service in modules:
        return (sys.executable, "-m", modules[service], service)
    if trace is not None:
        return (sys.executable, "-m", "parts.traced_service", service)
    return spec.command


async def _until_ready(settings: Settings) -> None:
    """Raises TimeoutError."""
    async with asyncio.timeout(READY_TIMEOUT_S):
        await wait_until_ready(settings)

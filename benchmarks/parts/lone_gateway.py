"""Real gateways over scripted tokenizer services, and nothing below."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Final, NamedTuple

import aiohttp
import psutil

from pagemesh.children import service_specs
from pagemesh.gateway_port import held_port
from pagemesh.shared.registry import Registry
from pagemesh.shared.settings import GatewaySettings, LogSettings, MeshSettings, Settings
from pagemesh.supervisor import ChildSpec, first
from parts import scripted_tokenizer
from parts.services import free_port, processes_by_service, python_path, supervised

READY_TIMEOUT_S: Final = 30.0
POLL_S: Final = 0.05
# The lines are made and written; who would read them has the other cores to himself.
_QUIET: Final = ("sh", "-c", 'exec "$@" 2>/dev/null', "sh")


class Gateways(NamedTuple):
    """They share `url`; each has its own among `urls` too."""

    url: str
    urls: list[str]
    processes: list[psutil.Process]

    async def scrape(self, session: aiohttp.ClientSession) -> list[str]:
        """The metrics of each."""
        return [await _text(session, f"{url}/metrics") for url in self.urls]

    def cpu_s(self) -> list[tuple[float, float]]:
        """User and system seconds of each until now."""
        times = [process.cpu_times() for process in self.processes]
        return [(each.user, each.system) for each in times]


@asynccontextmanager
async def running_gateways(
    n: int, step_s: float, cores: Sequence[int], log_level: str
) -> AsyncIterator[Gateways]:
    """`n` gateways, and as many tokenizer services whose steps take `step_s`. The i-th gateway
    alone has the i-th of `cores`, if there are as many. Raises TimeoutError."""
    settings = Settings(
        gateway=GatewaySettings(port=free_port()),
        mesh=MeshSettings(mesh_secret="benchmark", gateways=n, tokenizers=n),
        log=LogSettings(log_level=log_level, log_format="json"),  # type: ignore[arg-type]
    )
    with held_port(settings):
        async with supervised(settings) as (settings, supervisor):
            for service in ("tokenizer", "gateway"):
                specs = service_specs(service, settings)
                supervisor.start(*(_alone(spec, service, step_s) for spec in specs))
            urls: list[str] = []
            await first(supervisor.watch(), _until_ready(settings, n, urls))
            supervisor.mark_ready()
            processes = processes_by_service(["gateway"])["gateway"]
            _place(processes, cores)
            yield Gateways(f"http://127.0.0.1:{settings.gateway.port}", urls, processes)


def _place(gateways: Sequence[psutil.Process], cores: Sequence[int]) -> None:
    """Everything else below this process goes elsewhere."""
    if len(cores) < len(gateways):
        return
    mine = set(cores[: len(gateways)])
    others = [core for core in range(os.cpu_count() or 1) if core not in mine]
    for child in psutil.Process().children(recursive=True):
        child.cpu_affinity(others)
    for gateway, core in zip(gateways, cores, strict=False):
        gateway.cpu_affinity([core])


def _alone(spec: ChildSpec, service: str, step_s: float) -> ChildSpec:
    environ = {
        **spec.environ,
        "PYTHONPATH": python_path(),
        scripted_tokenizer.STEP_S: str(step_s),
    }
    command = spec.command
    if service == "tokenizer":
        command = (sys.executable, "-m", "parts.scripted_tokenizer", service)
    return spec._replace(command=(*_QUIET, *command), environ=environ)


async def _until_ready(settings: Settings, n: int, urls: list[str]) -> None:
    """`urls` gets the addresses of the gateways."""
    async with asyncio.timeout(READY_TIMEOUT_S), aiohttp.ClientSession() as session:
        urls += await _addresses(settings, n)
        for url in urls:
            while await _links(session, url) < n:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)


async def _addresses(settings: Settings, n: int) -> list[str]:
    registry = Registry(settings.mesh.redis_url or "", settings.mesh.mesh_name)
    try:
        async with aclosing(registry.watch("gateway")) as watch:
            async for instances in watch:
                if len(instances) == n:
                    return [f"http://{instance.address}" for instance in instances]
    finally:
        await registry.close()
    raise AssertionError("the watch ended")


async def _links(session: aiohttp.ClientSession, url: str) -> int:
    """How many tokenizer services a gateway knows: each brings an engine of its own."""
    metrics = await _text(session, f"{url}/metrics")
    return metrics.count("\nvllm:num_requests_running{")


async def _text(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(url) as answer:
        return await answer.text()

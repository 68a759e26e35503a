"""Services under a benchmark, started with the pieces of `pagemesh serve`."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec
import psutil
from redis.exceptions import RedisError

from pagemesh.children import line_writer
from pagemesh.embedded_valkey import embedded_valkey
from pagemesh.shared.registry import Registry
from pagemesh.shared.settings import Settings
from pagemesh.supervisor import Supervisor, first

BENCHMARKS: Final = Path(__file__).resolve().parents[1]
VALKEY_TIMEOUT_S: Final = 10.0
POLL_S: Final = 0.05
_GRACE_S: Final = 10.0


@asynccontextmanager
async def supervised(settings: Settings) -> AsyncIterator[tuple[Settings, Supervisor]]:
    """The settings with the address of a Valkey that answers, and the supervisor it runs under.

    Every child of the supervisor ends with the block. Raises TimeoutError when Valkey is silent.
    """
    with embedded_valkey() as valkey:
        mesh = msgspec.structs.replace(settings.mesh, redis_url=valkey.url)
        settings = msgspec.structs.replace(settings, mesh=mesh)
        supervisor = Supervisor(line_writer(settings))
        supervisor.start(valkey.spec)
        registry = Registry(valkey.url, mesh.mesh_name)
        try:
            await first(supervisor.watch(), _until_answer(registry))
            yield settings, supervisor
        finally:
            await registry.close()
            await supervisor.stop(_GRACE_S)


async def _until_answer(registry: Registry) -> None:
    async with asyncio.timeout(VALKEY_TIMEOUT_S):
        while True:
            try:
                return await registry.ping()
            except (RedisError, OSError):
                await asyncio.sleep(POLL_S)


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def python_path() -> str:
    """Where a child of this process finds `parts`, and all that this process finds."""
    inherited = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(filter(None, (str(BENCHMARKS), inherited)))


def service_processes(services: Iterable[str]) -> dict[str, psutil.Process]:
    """Of the children of this process; each service has one."""
    return {service: one for service, [one] in processes_by_service(services).items()}


def processes_by_service(services: Iterable[str]) -> dict[str, list[psutil.Process]]:
    """Of the children of this process: a service's name is its last argument."""
    children = [(child.cmdline()[-1], child) for child in psutil.Process().children(recursive=True)]
    return {service: [child for name, child in children if name == service] for service in services}

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial

import aiohttp
import pytest
import torch
from msgspec.structs import replace
from worker_harness import tiny_decoder, tiny_runner
from worker_service_harness import BuildRunner, Worker, announced

from pagemesh.shared.registry import Registry
from pagemesh.shared.service import serve
from pagemesh.shared.settings import MeshSettings, Settings
from pagemesh.worker_svc.models.decoder import Decoder
from pagemesh.worker_svc.service import WorkerService


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from a second thread, and lose much when another core is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def decoder() -> Decoder:
    return tiny_decoder()


@pytest.fixture
async def start(
    redis_url: str, mesh_name: str
) -> AsyncIterator[Callable[[BuildRunner], AsyncIterator[Worker]]]:
    mesh = MeshSettings(redis_url=redis_url, mesh_name=mesh_name, drain_timeout_s=20)
    registry = Registry(redis_url, mesh_name)

    @asynccontextmanager
    async def start(build: BuildRunner, **more: float) -> AsyncIterator[Worker]:
        """`more` settings of the mesh."""
        settings = Settings(mesh=replace(mesh, **more))
        service = partial(WorkerService, build=build)
        task = asyncio.create_task(serve("worker", settings, service, host="127.0.0.1", port=0))
        async with aiohttp.ClientSession() as session:
            address = await announced(registry)
            try:
                yield Worker(address, task, session)
            finally:
                if not task.done():
                    os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.gather(task, return_exceptions=True)

    yield start
    await registry.close()


@pytest.fixture
async def worker(start: Callable, decoder: Decoder) -> AsyncIterator[Worker]:
    async with start(lambda _settings, _report: tiny_runner(decoder)) as worker:
        yield worker

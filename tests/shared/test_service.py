"""The shell of a service: its HTTP side, its place in the registry, its end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from msgspec.structs import replace
from prometheus_client import Counter

from pagemesh.shared.errors import StartupError
from pagemesh.shared.registry import Instance, Load, Registry
from pagemesh.shared.service import Runtime, serve
from pagemesh.shared.settings import MeshSettings, Settings
from pagemesh.shared.shared_port import shared_socket


class Core:
    """A service that says when it runs and records how it is stopped."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.reason: str | None = None
        self.events: list[str] = []
        self.fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.may_end = asyncio.Event()
        self.may_end.set()
        Counter("made_up", "A series", registry=runtime.metrics).inc()

    def routes(self) -> list[web.RouteDef]:
        async def hello(_: web.Request) -> web.Response:
            return web.Response(text="hello")

        return [web.get("/hello", hello)]

    def load(self) -> Load:
        return Load()

    def not_ready(self) -> str | None:
        return self.reason

    async def run(self) -> None:
        self.events.append("run")
        try:
            await self.fault
        except asyncio.CancelledError:
            self.events.append("cancelled")
            raise

    async def drain(self) -> None:
        self.events.append("drain")
        await self.may_end.wait()
        self.events.append("drained")


class Running:
    """A service in this process, found through the registry as its peers find it."""

    def __init__(self, settings: Settings, shared_port: int | None, reason: str | None) -> None:
        self.settings = settings
        self._reason = reason
        self.cores: list[Core] = []
        self.task = asyncio.create_task(
            serve(
                "worker",
                settings,
                self._build,
                host="127.0.0.1",
                port=0,
                shared_port=shared_port,
            )
        )

    def _build(self, runtime: Runtime) -> Core:
        self.cores.append(Core(runtime))
        self.cores[0].reason = self._reason
        return self.cores[0]

    async def instance(self, registry: Registry) -> Instance:
        async for instances in registry.watch("worker"):
            if instances:
                return instances[0]
        raise AssertionError("watch ended")


@pytest.fixture
def settings(redis_url: str, mesh_name: str) -> Settings:
    return Settings(mesh=MeshSettings(redis_url=redis_url, mesh_name=mesh_name))


@pytest.fixture
async def registry(redis_url: str, mesh_name: str) -> AsyncIterator[Registry]:
    registry = Registry(redis_url, mesh_name)
    yield registry
    await registry.close()


@asynccontextmanager
async def up(
    settings: Settings,
    registry: Registry,
    shared_port: int | None = None,
    reason: str | None = None,
) -> AsyncIterator[tuple[Core, str]]:
    """The core of a running service and its base URL; stopped by SIGTERM at the end."""
    running = Running(settings, shared_port, reason)
    instance = await running.instance(registry)
    try:
        yield running.cores[0], f"http://{instance.address}"
    finally:
        if not running.task.done():
            os.kill(os.getpid(), signal.SIGTERM)
        await running.task


async def get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, await answer.text()


async def is_refused(url: str) -> bool:
    try:
        await get(url)
    except aiohttp.ClientConnectorError:
        return True
    return False


async def test_health_ready_metrics_and_own_routes(settings: Settings, registry: Registry) -> None:
    async with up(settings, registry) as (core, url):
        assert await get(f"{url}/health") == (200, '{"status": "alive"}')
        assert await get(f"{url}/ready") == (200, '{"status": "ready"}')
        core.reason = "no worker"
        assert await get(f"{url}/ready") == (503, '{"status": "not ready", "reason": "no worker"}')
        assert (await get(f"{url}/health"))[0] == 200
        assert "made_up_total 1.0" in (await get(f"{url}/metrics"))[1]
        assert await get(f"{url}/hello") == (200, "hello")


async def test_whether_redis_answers_is_a_metric(settings: Settings, registry: Registry) -> None:
    async with up(settings, registry) as (core, url):
        assert "pagemesh_redis_up 1.0" in (await get(f"{url}/metrics"))[1]
    nobody = Registry("redis://127.0.0.1:1", "m")
    runtime = Runtime("worker", settings, nobody, core.runtime.session)
    await nobody.withdraw(Instance("worker", "worker-1", "127.0.0.1:1", 1))
    assert runtime.metrics.get_sample_value("pagemesh_redis_up") == 0
    await nobody.close()


async def test_sigterm_withdraws_then_drains_then_cancels(
    settings: Settings, registry: Registry
) -> None:
    async with up(settings, registry) as (core, _):
        core.may_end.clear()
        os.kill(os.getpid(), signal.SIGTERM)
        async for instances in registry.watch("worker"):
            if not instances:
                break
        assert core.events == ["run", "drain"]
        core.may_end.set()
    assert core.events == ["run", "drain", "drained", "cancelled"]


async def test_a_drain_has_a_limit(settings: Settings, registry: Registry) -> None:
    hasty = replace(settings, mesh=replace(settings.mesh, drain_timeout_s=0.01))
    async with up(hasty, registry) as (core, _):
        core.may_end.clear()
    assert core.events == ["run", "drain", "cancelled"]


async def test_a_fault_in_run_ends_the_process(settings: Settings, registry: Registry) -> None:
    with pytest.raises(RuntimeError, match="a fault"):
        async with up(settings, registry) as (core, _):
            core.fault.set_exception(RuntimeError("a fault"))


async def test_a_busy_port_is_one_sentence(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"127.0.0.1:{port}: Address already in use"):
            await serve("worker", settings, Core, host="127.0.0.1", port=port)


async def test_a_shared_port_is_served_from_readiness_to_the_drain(
    settings: Settings, registry: Registry
) -> None:
    with shared_socket("127.0.0.1", 0) as neighbour:
        port = neighbour.getsockname()[1]
        shared_url = f"http://127.0.0.1:{port}/hello"
        async with up(settings, registry, port, "no worker") as (core, own_url):
            assert (await get(f"{own_url}/ready"))[0] == 503
            assert await is_refused(shared_url)
            core.reason = None
            while await is_refused(shared_url):
                pass
            assert await get(shared_url) == await get(f"{own_url}/hello") == (200, "hello")
            core.may_end.clear()
            os.kill(os.getpid(), signal.SIGTERM)
            while not await is_refused(shared_url):
                pass
            assert await get(f"{own_url}/hello") == (200, "hello")
            core.may_end.set()


async def test_a_port_that_somebody_does_not_share_is_one_sentence(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"127.0.0.1:{port}: Address already in use"):
            await serve("worker", settings, Core, host="127.0.0.1", port=0, shared_port=port)


async def test_a_missing_redis_is_one_sentence_without_the_password() -> None:
    settings = Settings(mesh=MeshSettings(redis_url="redis://:hidden@127.0.0.1:1"))
    with pytest.raises(StartupError, match="cannot reach Redis") as caught:
        await serve("worker", settings, Core, host="127.0.0.1", port=0)
    assert "hidden" not in str(caught.value)


async def test_a_service_without_a_registry_says_what_to_set() -> None:
    with pytest.raises(StartupError, match="--redis-url"):
        await serve("worker", Settings(), Core, host="127.0.0.1", port=0)

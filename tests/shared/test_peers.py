"""Peers against real services and a real registry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from pagemesh.shared import peers as peers_module
from pagemesh.shared.distribution import Observations
from pagemesh.shared.link import LINK_PATH, Link, accept
from pagemesh.shared.messages import Cancel, Hello
from pagemesh.shared.peers import Peers
from pagemesh.shared.registry import Instance, Registry
from pagemesh.shared.wire import PROTOCOL, Message


class Below:
    """A service below: accepts links, remembers them, reads them to their end."""

    def __init__(self, name: str, secret: str = "secret") -> None:
        self.hello = Hello(PROTOCOL, "worker", name, 1, secret)
        self.links: asyncio.Queue[Link] = asyncio.Queue()
        self.open: list[Link] = []
        self.heard: asyncio.Queue[Message] = asyncio.Queue()
        self.instance = Instance("worker", name, "", 1)

    async def endpoint(self, request: web.Request) -> web.WebSocketResponse:
        link, socket = await accept(request, self.hello)
        if link is not None:
            self.links.put_nowait(link)
            self.open.append(link)
            async for message in link:
                self.heard.put_nowait(message)
            await link.close()
        return socket

    @asynccontextmanager
    async def up(self) -> AsyncIterator[Instance]:
        app = web.Application()
        app.router.add_get(LINK_PATH, self.endpoint)
        async with TestServer(app) as server:
            yield self.instance._replace(address=f"{server.host}:{server.port}")
            await asyncio.gather(*[link.close() for link in self.open])


class Above:
    """The owner of the Peers: hears of links through queues, so no test has to poll."""

    def __init__(self, registry: Registry, session: aiohttp.ClientSession) -> None:
        self.came: asyncio.Queue[Link] = asyncio.Queue()
        self.went: asyncio.Queue[Link] = asyncio.Queue()
        self.metrics = CollectorRegistry()
        self.fault: BaseException | None = None
        hello = Hello(PROTOCOL, "scheduler", "scheduler-1", 1, "secret")
        self.peers = Peers("worker", registry, session, lambda: hello, self._on_link, self.metrics)

    async def _on_link(self, link: Link) -> None:
        self.came.put_nowait(link)
        if self.fault is not None:
            raise self.fault
        async for _ in link:
            pass
        self.went.put_nowait(link)


@pytest.fixture
async def registry(redis_url: str, mesh_name: str) -> AsyncIterator[Registry]:
    registry = Registry(redis_url, mesh_name)
    yield registry
    await registry.close()


@pytest.fixture
async def above(registry: Registry) -> AsyncIterator[Above]:
    async with aiohttp.ClientSession() as session:
        above = Above(registry, session)
        running = asyncio.create_task(above.peers.run())
        yield above
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert above.peers.links == {}


@asynccontextmanager
async def announcing(registry: Registry, instance: Instance) -> AsyncIterator[None]:
    task = asyncio.create_task(registry.announce(instance))
    try:
        yield
    finally:
        task.cancel()


async def test_newcomers_are_dialled(above: Above, registry: Registry) -> None:
    one, two = Below("worker-1"), Below("worker-2")
    async with (
        one.up() as first,
        two.up() as second,
        announcing(registry, first),
        announcing(registry, second),
    ):
        links = [await above.came.get(), await above.came.get()]
        assert {link.name for link in links} == {"worker-1", "worker-2"}
        assert set(above.peers.links) == {"worker-1", "worker-2"}
        above.peers.links["worker-2"].send(Cancel("r"))
        assert await two.heard.get() == Cancel("r")
        assert one.heard.empty()


async def test_links_are_measured(
    above: Above, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "ECHO_PERIOD_S", 0.001)
    round_trips_s: asyncio.Queue[float] = asyncio.Queue()
    monkeypatch.setattr(Observations, "observe", lambda _, value: round_trips_s.put_nowait(value))
    below = Below("worker-1")
    async with below.up() as instance, announcing(registry, instance):
        assert await round_trips_s.get() > 0
    name, labels = "pagemesh_link_round_trip_seconds_count", {"peer_service": "worker"}
    assert above.metrics.get_sample_value(name, labels) == 0


async def test_a_broken_link_is_dialled_again(above: Above, registry: Registry) -> None:
    below = Below("worker-1")
    async with below.up() as instance, announcing(registry, instance):
        first = await above.came.get()
        await (await below.links.get()).close("a fault")
        assert await above.went.get() is first
        second = await above.came.get()
        assert second is not first
        assert above.peers.links == {"worker-1": second}


@pytest.mark.parametrize("fault", [KeyError("a fault"), asyncio.CancelledError()])
async def test_a_fault_of_the_owner_does_not_cost_the_peer(
    above: Above, registry: Registry, fault: BaseException
) -> None:
    below = Below("worker-1")
    above.fault = fault
    async with below.up() as instance, announcing(registry, instance):
        first = await above.came.get()
        above.fault = None
        second = await above.came.get()
        assert second is not first
        assert first.closed
        assert above.peers.links == {"worker-1": second}


async def test_a_lapsed_key_closes_nothing(above: Above, registry: Registry) -> None:
    below = Below("worker-1")
    async with below.up() as instance:
        async with announcing(registry, instance):
            link = await above.came.get()
        await registry.withdraw(instance)
        async for instances in registry.watch("worker"):
            if not instances:
                break
        link.send(Cancel("still there"))
        assert await below.heard.get() == Cancel("still there")
        assert above.went.empty()


async def test_a_withdrawn_instance_is_not_dialled_again(above: Above, registry: Registry) -> None:
    leaving, marker, last = Below("worker-1"), Below("worker-2"), Below("worker-3")
    async with leaving.up() as first, marker.up() as second, last.up() as third:
        async with announcing(registry, first):
            await above.came.get()
        await registry.withdraw(first)
        async with announcing(registry, second):
            # Whoever sees the marker has seen the withdrawal too.
            assert (await above.came.get()).name == "worker-2"
            await (await leaving.links.get()).close()
            await above.went.get()
            async with announcing(registry, third):
                assert (await above.came.get()).name == "worker-3"
        assert leaving.links.empty()


async def test_another_secret_gets_no_link(above: Above, registry: Registry) -> None:
    stranger, friend = Below("worker-1", secret="another"), Below("worker-2")
    async with (
        stranger.up() as first,
        friend.up() as second,
        announcing(registry, first),
        announcing(registry, second),
    ):
        assert (await above.came.get()).name == "worker-2"
        assert stranger.links.empty()


async def test_a_refusal_is_told_once_though_the_peer_is_wanted_again(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a scheduler whose lease is taken, refused and freed over and over."""
    monkeypatch.setattr(peers_module, "MAX_BACKOFF_S", 0.001)
    refused: asyncio.Queue[str] = asyncio.Queue()
    hello = Hello(PROTOCOL, "scheduler", "scheduler-1", 1, "secret")
    async with (
        Below("worker-1", secret="another").up() as instance,
        aiohttp.ClientSession() as session,
    ):
        peers = Peers(
            "worker",
            registry,
            session,
            lambda: hello,
            lambda _: asyncio.sleep(0),
            CollectorRegistry(),
            on_refused=refused.put_nowait,
        )
        with capture_logs() as logs:
            for _ in range(3):
                peers.want([instance])
                assert await refused.get() == "worker-1"
                await peers.close()
                while not refused.empty():
                    refused.get_nowait()
    assert [line["event"] for line in logs] == ["handshake_refused"]

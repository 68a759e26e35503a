"""Scripted neighbours of the tokenizer service, over real sockets: a gateway and a scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import TracebackType

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from pagemesh.shared.engine_messages import End, Submit
from pagemesh.shared.link import LINK_PATH, Link, accept, dial
from pagemesh.shared.messages import (
    Accepted,
    Begun,
    Delta,
    Deltas,
    Engines,
    EngineStatus,
    Failed,
    Hello,
)
from pagemesh.shared.registry import Instance, Registry
from pagemesh.shared.service import Runtime
from pagemesh.shared.settings import Settings
from pagemesh.shared.wire import PROTOCOL, Message
from pagemesh.tokenizer_svc.service import TokenizerService


class ScriptedScheduler:
    """Accepts tokenizer links and says what the test tells it to."""

    def __init__(self, registry: Registry, name: str, engines: list[EngineStatus]) -> None:
        self.name = name
        self.engines = engines
        self.submits: asyncio.Queue[Submit] = asyncio.Queue()
        self.ends: asyncio.Queue[End] = asyncio.Queue()
        self.links: list[Link] = []
        self._registry = registry
        self._server: TestServer | None = None
        self._beat: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ScriptedScheduler:
        app = web.Application()
        app.router.add_get(LINK_PATH, self._endpoint)
        self._server = TestServer(app)
        await self._server.start_server()
        address = f"{self._server.host}:{self._server.port}"
        instance = Instance("scheduler", self.name, address, 1)
        self._beat = asyncio.create_task(self._registry.announce(instance))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.die()

    async def die(self) -> None:
        """Close every link and stop listening."""
        if self._beat is None or self._server is None:
            return
        self._beat.cancel()
        await asyncio.gather(self._beat, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in self.links))
        await self._server.close()
        self._beat = None

    def send(self, message: Message) -> None:
        for link in self.links:
            link.send(message)

    async def _endpoint(self, request: web.Request) -> web.WebSocketResponse:
        hello = Hello(PROTOCOL, "scheduler", self.name, 1, "", self.engines)
        link, socket = await accept(request, hello)
        if link is None:
            return socket
        self.links.append(link)
        async for message in link:
            if isinstance(message, Submit):
                self.submits.put_nowait(message)
            elif isinstance(message, End):
                self.ends.put_nowait(message)
        self.links.remove(link)
        await link.close()
        return socket


class ScriptedGateway:
    """Dials the service and sorts what it hears, in order, by request."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.engines: asyncio.Queue[Engines] = asyncio.Queue()
        self.begun: list[Begun] = []
        self._heard: dict[str, asyncio.Queue[Message]] = {}
        self._reader = asyncio.create_task(self._read())

    def ask(self, message: Message) -> None:
        self.link.send(message)

    async def next(self, request_id: str) -> Message:
        """The next message about one request; a row of Deltas comes as itself."""
        return await self._queue(request_id).get()

    async def accepted(self, request_id: str) -> Accepted:
        message = await self.next(request_id)
        assert isinstance(message, Accepted), message
        return message

    async def delta(self, request_id: str) -> Delta:
        message = await self.next(request_id)
        assert isinstance(message, Delta), message
        return message

    async def failed(self, request_id: str) -> Failed:
        message = await self.next(request_id)
        assert isinstance(message, Failed), message
        return message

    async def rest(self, request_id: str) -> list[Delta]:
        """Deltas up to the one that ends the (only) choice."""
        deltas = [await self.delta(request_id)]
        while deltas[-1].finish_reason is None and deltas[-1].error is None:
            deltas.append(await self.delta(request_id))
        return deltas

    def is_silent(self, request_id: str) -> bool:
        return self._queue(request_id).empty()

    async def ended(self) -> None:
        """Wait until the service has closed the link."""
        await self._reader

    async def ready(self) -> Engines:
        """Wait until the service knows an engine."""
        while not (engines := await self.engines.get()).engines:
            pass
        return engines

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self.link.close()

    def _queue(self, request_id: str) -> asyncio.Queue[Message]:
        return self._heard.setdefault(request_id, asyncio.Queue())

    async def _read(self) -> None:
        async for message in self.link:
            if isinstance(message, Engines):
                self.engines.put_nowait(message)
            elif isinstance(message, Deltas):
                self.begun += message.begun
                for row in message.rows:
                    self._queue(row.request_id).put_nowait(row)
            else:
                self._queue(message.request_id).put_nowait(message)  # type: ignore[union-attr]


class Mesh:
    """One running tokenizer service and the means to give it neighbours."""

    def __init__(self, service: TokenizerService, runtime: Runtime, address: str) -> None:
        self.service = service
        self.runtime = runtime
        self._address = address
        self._gateways: list[ScriptedGateway] = []

    async def dial(self, name: str = "gateway-1") -> Link:
        hello = Hello(PROTOCOL, "gateway", name, 1, "")
        return await dial(self.runtime.session, self._address, hello)

    async def gateway(self, name: str = "gateway-1") -> ScriptedGateway:
        gateway = ScriptedGateway(await self.dial(name))
        self._gateways.append(gateway)
        return gateway

    def scheduler(self, *engines: EngineStatus, name: str = "scheduler-1") -> ScriptedScheduler:
        return ScriptedScheduler(self.runtime.registry, name, list(engines))

    async def close(self) -> None:
        await asyncio.gather(*(gateway.close() for gateway in self._gateways))


@asynccontextmanager
async def running_service(settings: Settings, redis_url: str, mesh: str) -> AsyncIterator[Mesh]:
    registry = Registry(redis_url, mesh)
    async with aiohttp.ClientSession() as session:
        runtime = Runtime("tokenizer", settings, registry, session)
        service = TokenizerService(runtime)
        app = web.Application()
        app.add_routes(service.routes())
        work = asyncio.create_task(service.run())
        async with TestServer(app) as server:
            running = Mesh(service, runtime, f"{server.host}:{server.port}")
            try:
                yield running
            finally:
                await running.close()
                work.cancel()
                with suppress(asyncio.CancelledError):
                    await work
    await registry.close()

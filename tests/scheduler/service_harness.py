"""Neighbours of the scheduler service over real sockets: a scripted worker, a tokenizer link."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import aiohttp
from aiohttp import web
from scheduler_helpers import OWNER, Ledger, Seen
from worker_model import EPOCH, WorkerModel

from pagemesh.scheduler_svc.service import SchedulerService
from pagemesh.shared.engine_messages import End, Lost, Step, Submit, Tokens
from pagemesh.shared.errors import LinkClosed
from pagemesh.shared.leases import Lease
from pagemesh.shared.link import LINK_PATH, Link, accept, dial
from pagemesh.shared.messages import Capacity, Engines, EngineStats, EngineStatus, Hello, ModelCard
from pagemesh.shared.registry import Instance, Registry
from pagemesh.shared.service import Runtime, serve
from pagemesh.shared.settings import Settings
from pagemesh.shared.wire import PROTOCOL, Message
from pagemesh.worker_svc.command import Command

Start = Callable[..., "asyncio.Future[Scheduler]"]


class FakeWorker:
    """A worker process: its registry key, its link endpoint, and the strict model behind it.

    While `held`, steps are computed but their results wait for `release`. `refuse` is why it will
    have no scheduler.
    """

    def __init__(self, name: str, card: ModelCard, capacity: Capacity, registry: Registry) -> None:
        self.name = name
        self.held = False
        self.refuse: str | None = None
        self.steps: list[Step] = []
        self.model = WorkerModel(card, capacity)
        self.link: Link | None = None
        self.stepped = asyncio.Event()
        self._status = EngineStatus(name, card, capacity, EngineStats())
        self._registry = registry
        self._command = Command()
        self._results: deque[Message] = deque()
        self._runner: web.AppRunner | None = None
        self._beat: asyncio.Task[None] | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get(LINK_PATH, self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        instance = Instance("worker", self.name, f"{host}:{port}", EPOCH)
        self._beat = asyncio.create_task(self._registry.announce(instance))

    async def stop(self) -> None:
        """As a process that dies: the socket closes, the registry key lapses by itself."""
        if self._beat is not None and self._runner is not None:
            self._beat.cancel()
            await asyncio.gather(self._beat, return_exceptions=True)
            if self.link is not None:
                self.link.abort("the worker died")
            await self._runner.cleanup()

    def offer(self, *, draining: bool = False) -> None:
        self.send(Engines([self._status], draining=draining))

    def send(self, message: Message) -> None:
        assert self.link is not None
        with suppress(LinkClosed):
            self.link.send(message)

    def release(self, n: int = 1_000_000) -> None:
        """Send up to `n` results, oldest first."""
        for _ in range(min(n, len(self._results))):
            self.send(self._results.popleft())

    def resume(self) -> None:
        self.held = False
        self.release()

    async def until_steps(self, n: int) -> None:
        """Until `n` steps have arrived."""
        while len(self.steps) < n:
            self.stepped.clear()
            await self.stepped.wait()

    async def until_empty(self) -> None:
        """Until no row holds a slot."""
        while self.model.rows:
            self.stepped.clear()
            await self.stepped.wait()

    def _refusal(self, hello: Hello) -> str | None:
        return self.refuse or self._command.refusal(hello)

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        hello = Hello(PROTOCOL, "worker", self.name, EPOCH, "")
        link, socket = await accept(request, hello, self._refusal)
        if link is None or not self._command.join(link):
            return socket
        self.link = link
        self.offer()
        async for message in link:
            assert isinstance(message, Step)
            self.steps.append(message)
            self._results.append(self.model.execute(message))
            self.stepped.set()
            if not self.held:
                self.release()
        if self._command.leave(link):
            lease = Lease(link.peer.lease_term, link.name)
            await self._registry.leases.release(self.name, lease)
        await link.close()
        return socket


class FakeTokenizer(Ledger):
    """A tokenizer service's link to the scheduler. Messages are read while something is awaited."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self.link = link
        self.engines: list[EngineStatus] = []
        self.draining = False
        self.lost: list[tuple[str, int]] = []
        self._messages = aiter(link)

    def submit(self, submit: Submit, engine_id: str) -> Seen:
        self.link.send(submit._replace(engine_id=engine_id))
        return self.seen.setdefault((OWNER, submit.key), Seen())

    def end(self, *keys: int, reason: str = "abort") -> None:
        self.link.send(End(list(keys), reason))

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            self._on(await anext(self._messages))

    async def until_over(self, *answers: Seen) -> None:
        await self.until(lambda: all(answer.ended or answer.error for answer in answers))

    async def until_engines(self, *names: str) -> None:
        await self.until(lambda: sorted(s.engine_id for s in self.engines) == sorted(names))

    async def until_idle(self) -> None:
        """Until every engine reports that nothing runs or waits and that all blocks are free."""

        def idle() -> bool:
            stats = [status.stats for status in self.engines]
            return not any(s.running or s.waiting or s.kv_usage for s in stats)

        await self.until(idle)

    def _on(self, message: Message) -> None:
        match message:
            case Tokens():
                self.note_frame(OWNER, message)
            case Engines():
                self.engines, self.draining = message.engines, message.draining
            case Lost():
                self.lost += [(message.engine_id, key) for key in message.keys]
            case _:
                raise AssertionError(f"unexpected {message!r}")


class Scheduler:
    """The real service in this process, and whoever is linked to it."""

    def __init__(self, settings: Settings, session: aiohttp.ClientSession) -> None:
        assert settings.mesh.redis_url is not None
        self.registry = Registry(settings.mesh.redis_url, settings.mesh.mesh_name)
        self.service: SchedulerService | None = None
        self.address = self.name = ""
        self._settings = settings
        self._session = session
        self._task: asyncio.Task[None] | None = None
        self._links: list[Link] = []
        self._workers: list[FakeWorker] = []

    async def start(self) -> None:
        self._task = asyncio.create_task(
            serve("scheduler", self._settings, self._build, host="127.0.0.1", port=0)
        )
        async for instances in self.registry.watch("scheduler"):
            ours = [each for each in instances if each.instance_id == self.name]
            if ours:
                self.address = ours[0].address
                break

    async def stop(self) -> None:
        for link in self._links:
            await link.close()
        await self.die()
        for worker in self._workers:
            await worker.stop()
        await self.registry.close()

    async def die(self) -> None:
        """As a process that dies: its links end, its registry key lapses by itself."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def worker(
        self,
        name: str,
        card: ModelCard,
        capacity: Capacity,
        *,
        held: bool = False,
        refuse: str | None = None,
    ) -> FakeWorker:
        worker = FakeWorker(name, card, capacity, self.registry)
        worker.held, worker.refuse = held, refuse
        self._workers.append(worker)
        await worker.start()
        return worker

    async def tokenizer(self, name: str = "tokenizer-1") -> FakeTokenizer:
        link = await dial(self._session, self.address, Hello(PROTOCOL, "tokenizer", name, 1, ""))
        self._links.append(link)
        return FakeTokenizer(link)

    async def get(self, path: str) -> tuple[int, str]:
        async with self._session.get(f"http://{self.address}{path}") as response:
            return response.status, await response.text()

    def _build(self, runtime: Runtime) -> SchedulerService:
        self.service, self.name = SchedulerService(runtime), runtime.instance_id
        return self.service

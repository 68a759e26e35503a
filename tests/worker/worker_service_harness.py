"""A worker service as its schedulers and its health probes see it, over real sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from queue import SimpleQueue
from typing import Any, NamedTuple

import aiohttp
from torch import Tensor
from worker_harness import Driver, tiny_runner

from pagemesh.kernels.inputs import AttentionInputs
from pagemesh.shared.engine_messages import StepResult
from pagemesh.shared.link import Link, dial
from pagemesh.shared.messages import Capacity, Engines, Hello
from pagemesh.shared.registry import Registry
from pagemesh.shared.settings import Settings
from pagemesh.shared.wire import PROTOCOL, Message, unpack_ids
from pagemesh.worker_svc.batch import Rows
from pagemesh.worker_svc.build import Report
from pagemesh.worker_svc.cpu_executor import CPUExecutor
from pagemesh.worker_svc.executor import Computed
from pagemesh.worker_svc.kv_cache import KVCache
from pagemesh.worker_svc.models.decoder import Decoder
from pagemesh.worker_svc.runner import Runner

PROMPT = [11, 3, 60, 7]

BuildRunner = Callable[[Settings, Report], Runner]


class Gate:
    """A model that computes only while the gate is open."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.open, self.reached = threading.Event(), threading.Event()

    def forward(
        self, token_ids: Tensor, positions: Tensor, inputs: AttentionInputs, kv: KVCache
    ) -> Tensor:
        self.reached.set()
        assert self.open.wait(30)
        return self._decoder(token_ids, positions, inputs, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._decoder.logits(hidden)


class HeldExecutor(CPUExecutor):
    """Stands for a device that computes while the host goes on: a step lands once it is let go.
    `launched` holds the number of rows of each part that was launched."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.launched: SimpleQueue[int] = SimpleQueue()
        self._landings: SimpleQueue[Exception | None] = SimpleQueue()

    def compute(self, rows: Rows) -> Computed:
        computed = super().compute(rows)
        self.launched.put(len(rows))
        return computed._replace(wait=self._wait)

    def let_go(self, error: Exception | None = None) -> None:
        """The next step lands, or is found lost."""
        self._landings.put(error)

    def _wait(self) -> None:
        error = self._landings.get(timeout=30)
        if error is not None:
            raise error


class Scheduler:
    """One scripted scheduler's link."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._messages = aiter(link)

    async def next(self, kind: type[Message] = StepResult) -> Message:
        message = await anext(self._messages)
        assert isinstance(message, kind)
        return message

    async def engines(self) -> Engines:
        message = await self.next(Engines)
        assert isinstance(message, Engines)
        return message

    async def tokens(self) -> list[int]:
        message = await self.next()
        assert isinstance(message, StepResult)
        return unpack_ids(message.sampled)

    async def ended(self) -> bool:
        return await anext(self._messages, None) is None


class Worker(NamedTuple):
    address: str
    task: asyncio.Task[None]
    session: aiohttp.ClientSession

    @asynccontextmanager
    async def scheduler(self, name: str = "s1", term: int = 1) -> AsyncIterator[Scheduler]:
        """Raises HandshakeRefused when it may not command."""
        hello = Hello(PROTOCOL, "scheduler", name, 1, "", lease_term=term)
        link = await dial(self.session, self.address, hello)
        try:
            yield Scheduler(link)
        finally:
            await link.close()

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(f"http://{self.address}{path}") as answer:
            return answer.status, await answer.text()


async def announced(registry: Registry) -> str:
    async for instances in registry.watch("worker"):
        if instances:
            return instances[0].address
    raise AssertionError("watch ended")


class Books:
    capacity = Capacity(96, 8, 64, 512, "cpu")


def driver(epoch: int = 1) -> Driver:
    """Keeps the books only; its steps go over a link."""
    return Driver(Books(), epoch=epoch)


class Gated(NamedTuple):
    """A worker whose model waits at `gate`, its scheduler, and books in which PROMPT entered."""

    gate: Gate
    worker: Worker
    scheduler: Scheduler
    books: Driver


class Held(NamedTuple):
    """A worker on a held device, its scheduler, and books in which PROMPT entered."""

    executor: HeldExecutor
    worker: Worker
    scheduler: Scheduler
    books: Driver

    async def launched(self) -> int:
        return await asyncio.to_thread(self.executor.launched.get, timeout=30)

    async def launch(self, *n_tokens: int) -> None:
        """Steps of so many tokens of slot 0, one launched after the other."""
        for n in n_tokens:
            self.scheduler.link.send(self.books.plan({0: n}))
            await self.launched()


@asynccontextmanager
async def held(start: Callable, decoder: Decoder) -> AsyncIterator[Held]:
    runner = tiny_runner(decoder, executor_type=HeldExecutor)
    executor, books = runner._executor, driver()
    assert isinstance(executor, HeldExecutor)
    async with (
        start(lambda _settings, _report: runner) as worker,
        worker.scheduler() as scheduler,
    ):
        await scheduler.engines()
        books.enter(0, PROMPT)
        yield Held(executor, worker, scheduler, books)


@asynccontextmanager
async def gated(start: Callable, decoder: Decoder, **more: float) -> AsyncIterator[Gated]:
    gate, books = Gate(decoder), driver()
    async with (
        start(lambda _settings, _report: tiny_runner(gate), **more) as worker,
        worker.scheduler() as scheduler,
    ):
        await scheduler.engines()
        books.enter(0, PROMPT)
        yield Gated(gate, worker, scheduler, books)

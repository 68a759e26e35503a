"""The worker service over real sockets, commanded by scripted schedulers."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple

import aiohttp
import pytest
import structlog
from torch import Tensor
from worker_harness import GREEDY, Driver, alone, tiny_runner

from pagemesh.kernels.inputs import AttentionInputs
from pagemesh.shared.errors import StartupError
from pagemesh.shared.link import Link, dial
from pagemesh.shared.registry import Registry
from pagemesh.shared.service import serve
from pagemesh.shared.settings import MeshSettings, Settings
from pagemesh.shared.wire import (
    PROTOCOL,
    Capacity,
    Engines,
    Hello,
    Message,
    NeedSnapshot,
    Step,
    StepResult,
    pack_ids,
    unpack_ids,
)
from pagemesh.worker_svc import service as service_module
from pagemesh.worker_svc.build import Report
from pagemesh.worker_svc.kv_cache import KVCache
from pagemesh.worker_svc.models.decoder import Decoder
from pagemesh.worker_svc.runner import Runner
from pagemesh.worker_svc.service import MAX_QUEUED_STEPS, WorkerService

PROMPT = [11, 3, 60, 7]


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
    async def scheduler(self, name: str = "s1", epoch: int = 1) -> AsyncIterator[Scheduler]:
        hello = Hello(PROTOCOL, "scheduler", name, epoch, "")
        link = await dial(self.session, self.address, hello)
        try:
            yield Scheduler(link)
        finally:
            await link.close()

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(f"http://{self.address}{path}") as answer:
            return answer.status, await answer.text()


BuildRunner = Callable[[Settings, Report], Runner]


@pytest.fixture
async def start(
    redis_url: str, mesh_name: str
) -> AsyncIterator[Callable[[BuildRunner], AsyncIterator[Worker]]]:
    settings = Settings(
        mesh=MeshSettings(redis_url=redis_url, mesh_name=mesh_name, drain_timeout_s=20)
    )
    registry = Registry(redis_url, mesh_name)

    @asynccontextmanager
    async def start(build: BuildRunner) -> AsyncIterator[Worker]:
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


async def announced(registry: Registry) -> str:
    async for instances in registry.watch("worker"):
        if instances:
            return instances[0].address
    raise AssertionError("watch ended")


@pytest.fixture
async def worker(start: Callable, decoder: Decoder) -> AsyncIterator[Worker]:
    async with start(lambda _settings, _report: tiny_runner(decoder)) as worker:
        yield worker


def driver(epoch: int = 1) -> Driver:
    """Keeps the books only; its steps go over a link."""
    return Driver(Books(), epoch=epoch)


class Books:
    capacity = Capacity(96, 8, 64, 512, "cpu")


async def test_the_engine_is_offered_and_computes_steps_in_order(
    worker: Worker, decoder: Decoder
) -> None:
    async with worker.scheduler() as scheduler:
        assert scheduler.link.peer.engines == []
        (status,) = (await scheduler.engines()).engines
        assert status.engine_id == scheduler.link.name
        assert (status.card.names, status.capacity) == (["tiny"], Books.capacity)
        books = driver()
        books.enter(0, PROMPT)
        for n in (4, 1, 1, 1):
            scheduler.link.send(books.plan({0: n}))
        tokens = [(await scheduler.tokens())[0] for _ in range(4)]
        assert tokens == alone(decoder, PROMPT, GREEDY, 4)


async def test_health_answers_while_the_model_loads(start: Callable, decoder: Decoder) -> None:
    may_load = threading.Event()

    def build(_: Settings, report: Report) -> Runner:
        report("loading the weights of tiny")
        assert may_load.wait(30)
        return tiny_runner(decoder)

    async with start(build) as worker, worker.scheduler() as scheduler:
        assert (await worker.get("/health"))[0] == 200
        status, text = await worker.get("/ready")
        assert status == 503
        assert "loading the weights of tiny" in text
        scheduler.link.send(driver().plan({}))  # nobody is there to answer it
        may_load.set()
        assert len((await scheduler.engines()).engines) == 1
        assert (await worker.get("/ready"))[0] == 200


async def test_a_model_that_cannot_load_ends_the_process_with_its_sentence(
    start: Callable,
) -> None:
    may_fail = threading.Event()

    def build(_: Settings, __: Report) -> Runner:
        assert may_fail.wait(30)
        raise StartupError("the weights are truncated")

    async with start(build) as worker:
        may_fail.set()
        with pytest.raises(StartupError, match="the weights are truncated"):
            await worker.task


async def test_health_answers_while_a_step_computes(
    start: Callable, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(decoder)
    async with (
        start(lambda _settings, _report: tiny_runner(gate)) as worker,
        worker.scheduler() as scheduler,
    ):
        await scheduler.engines()
        books = driver()
        books.enter(0, PROMPT)
        scheduler.link.send(books.plan({0: 4}))
        assert await asyncio.to_thread(gate.reached.wait, 30)
        assert (await worker.get("/health"))[0] == 200
        assert (await worker.get("/ready"))[0] == 200
        monkeypatch.setattr(service_module, "STUCK_STEP_S", 0.0)
        status, text = await worker.get("/ready")
        assert (status, "a step has been computing" in text) == (503, True)
        gate.open.set()
        assert await scheduler.tokens() == alone(decoder, PROMPT, GREEDY, 1)
        assert (await worker.get("/ready"))[0] == 200


async def test_a_step_that_hangs_is_reported_with_what_it_does(
    start: Callable, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "WATCH_PERIOD_S", 0.001)
    monkeypatch.setattr(service_module, "STUCK_STEP_S", 0.0)
    reported = asyncio.Event()
    entries: list[dict[str, object]] = []

    def note(_: object, __: str, entry: dict[str, object]) -> dict[str, object]:
        if entry["event"] == "step_stuck":
            entries.append(entry)
            reported.set()
        raise structlog.DropEvent

    monkeypatch.setattr(service_module, "log", structlog.wrap_logger(None, processors=[note]))
    gate = Gate(decoder)
    async with (
        start(lambda _settings, _report: tiny_runner(gate)) as worker,
        worker.scheduler() as scheduler,
    ):
        await scheduler.engines()
        books = driver()
        books.enter(0, PROMPT)
        scheduler.link.send(books.plan({0: 4}))
        await reported.wait()
        gate.open.set()
        await scheduler.tokens()
    assert len(entries) == 1
    assert "in forward" in str(entries[0]["stack"])


async def test_a_runner_that_breaks_costs_its_scheduler_the_link(
    start: Callable, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Step) -> StepResult:
        raise AssertionError("a bug")

    runner = tiny_runner(decoder)
    async with start(lambda _settings, _report: runner) as worker:
        async with worker.scheduler() as scheduler:
            await scheduler.engines()
            with monkeypatch.context() as patch:
                patch.setattr(runner, "execute", broken)
                scheduler.link.send(driver().plan({}))
                assert await scheduler.ended()
        async with worker.scheduler() as scheduler:
            await scheduler.engines()
            scheduler.link.send(driver().plan({}))
            assert await scheduler.tokens() == []


async def test_the_youngest_scheduler_commands_and_the_next_takes_over_from_an_empty_batch(
    worker: Worker, decoder: Decoder
) -> None:
    async with worker.scheduler("old", epoch=1) as old:
        assert len((await old.engines()).engines) == 1
        books = driver()
        books.enter(0, PROMPT)
        old.link.send(books.plan({0: 4}))
        first = await old.tokens()
        async with worker.scheduler("young", epoch=2) as young:
            assert (await old.engines()).engines == []
            assert len((await young.engines()).engines) == 1
            old.link.send(books.plan({0: 1}))  # no longer heard
            theirs = driver(epoch=7)
            theirs.enter(0, PROMPT[1:])
            young.link.send(theirs.plan({0: 3}))
            assert await young.tokens() == alone(decoder, PROMPT[1:], GREEDY, 1)
        assert len((await old.engines()).engines) == 1
        old.link.send(books.plan({0: 1}))
        assert await old.next(NeedSnapshot) == NeedSnapshot(1, 0)
        books.leave(0)
        books.enter(5, PROMPT + first, n_prompt=4)
        old.link.send(books.plan({5: 5})._replace(base=0, gone=b""))
        assert await old.tokens() == alone(decoder, PROMPT, GREEDY, 2)[1:]


async def test_an_older_scheduler_stands_by(worker: Worker) -> None:
    async with worker.scheduler("young", epoch=2) as young:
        await young.engines()
        async with worker.scheduler("old", epoch=1) as old:
            old.link.send(driver().plan({}))
            young.link.send(driver().plan({}))
            assert await young.tokens() == []
            await young.link.close()
            # Its first word: the engine, once the other is gone.
            assert len((await old.engines()).engines) == 1


async def test_a_scheduler_that_dials_again_replaces_its_link(worker: Worker) -> None:
    async with worker.scheduler() as first:
        await first.engines()
        async with worker.scheduler() as second:
            assert len((await second.engines()).engines) == 1
            assert await first.ended()
            second.link.send(driver().plan({}))
            assert await second.tokens() == []


async def test_a_gap_is_answered_once_and_mended_by_a_snapshot(
    worker: Worker, decoder: Decoder
) -> None:
    async with worker.scheduler() as scheduler:
        await scheduler.engines()
        books = driver()
        books.enter(0, PROMPT)
        scheduler.link.send(books.plan({0: 4}))
        (token,) = await scheduler.tokens()
        books.plan({0: 1})  # lost
        scheduler.link.send(books.plan({0: 1}))
        scheduler.link.send(books.plan({0: 1}))
        assert await scheduler.next(NeedSnapshot) == NeedSnapshot(1, 1)
        books.leave(0)
        books.enter(0, [*PROMPT, token], n_prompt=4)
        scheduler.link.send(books.plan({0: 5})._replace(base=0, gone=b""))
        assert await scheduler.tokens() == alone(decoder, PROMPT, GREEDY, 2)[1:]


async def test_a_scheduler_that_sends_without_end_loses_its_link(
    start: Callable, decoder: Decoder
) -> None:
    gate = Gate(decoder)
    async with (
        start(lambda _settings, _report: tiny_runner(gate)) as worker,
        worker.scheduler() as scheduler,
    ):
        await scheduler.engines()
        books = driver()
        books.enter(0, PROMPT)
        for work in ({0: 4}, *({} for _ in range(MAX_QUEUED_STEPS))):
            scheduler.link.send(books.plan(work))
        assert await scheduler.ended()
        gate.open.set()
        async with worker.scheduler("other") as other:
            await other.engines()
            other.link.send(driver().plan({}))
            assert await other.tokens() == []


async def test_drain_lets_running_requests_finish(worker: Worker, decoder: Decoder) -> None:
    async with worker.scheduler() as scheduler:
        assert not (await scheduler.engines()).draining
        books = driver()
        books.enter(0, PROMPT)
        scheduler.link.send(books.plan({0: 4}))
        tokens = await scheduler.tokens()
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await scheduler.engines()).draining
        for _ in range(2):
            scheduler.link.send(books.plan({0: 1}))
            tokens += await scheduler.tokens()
        assert tokens == alone(decoder, PROMPT, GREEDY, 3)
        assert not worker.task.done()
        books.leave(0)
        scheduler.link.send(books.plan({}))
        await worker.task


async def test_metrics(worker: Worker) -> None:
    async with worker.scheduler() as scheduler:
        await scheduler.engines()
        books = driver()
        books.enter(0, PROMPT)
        scheduler.link.send(books.plan({0: 4}))
        scheduler.link.send(books.plan({0: 1}))
        scheduler.link.send(books.plan({0: 1})._replace(slots=pack_ids([7])))
        for _ in range(3):
            await scheduler.next()
        _, text = await worker.get("/metrics")
    for line in (
        "pagemesh_worker_steps_total 3.0",
        "pagemesh_worker_step_seconds_count 3.0",
        "pagemesh_worker_tokens_total 6.0",
        "pagemesh_worker_sampled_tokens_total 2.0",
        'pagemesh_worker_bad_rows_total{cause="failed"} 1.0',
        "pagemesh_kv_pool_blocks 95.0",
        "pagemesh_kv_pool_tokens 380.0",
        "pagemesh_kv_pool_bytes 196608.0",
    ):
        assert line in text.splitlines()

"""The worker service over real sockets, commanded by scripted schedulers."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable

import pytest
from worker_harness import GREEDY, alone, tiny_runner
from worker_service_harness import PROMPT, Books, Worker, driver, gated

from pagemesh.shared.errors import StartupError
from pagemesh.shared.settings import Settings
from pagemesh.shared.wire import pack_ids
from pagemesh.worker_svc.build import Report
from pagemesh.worker_svc.models.decoder import Decoder
from pagemesh.worker_svc.runner import Runner


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


async def test_health_answers_while_a_step_computes(start: Callable, decoder: Decoder) -> None:
    async with gated(start, decoder) as (gate, worker, scheduler, books):
        scheduler.link.send(books.plan({0: 4}))
        assert await asyncio.to_thread(gate.reached.wait, 30)
        assert (await worker.get("/health"))[0] == 200
        assert (await worker.get("/ready"))[0] == 200
        gate.open.set()
        assert await scheduler.tokens() == alone(decoder, PROMPT, GREEDY, 1)


async def test_a_drain_that_takes_too_long_gives_its_requests_up(
    start: Callable, decoder: Decoder
) -> None:
    async with (
        start(lambda _settings, _report: tiny_runner(decoder), drain_timeout_s=0.2) as worker,
        worker.scheduler() as scheduler,
    ):
        await scheduler.engines()
        books = driver()
        books.enter(0, PROMPT)
        scheduler.link.send(books.plan({0: 4}))
        assert await scheduler.tokens() == alone(decoder, PROMPT, GREEDY, 1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await scheduler.engines()).draining
        assert await scheduler.ended()
        await worker.task


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
        scheduler.link.send(books.plan({0: 1})._replace(gone=pack_ids([7])))
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

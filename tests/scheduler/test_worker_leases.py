"""Schedulers that share workers, over real sockets and a real Valkey."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis.asyncio
from scheduler_helpers import expected_answer, make_capacity, make_card, make_submit
from service_harness import FakeTokenizer, FakeWorker, Scheduler, Start
from structlog.typing import EventDict

from pagemesh.scheduler_svc.leasing import RETURN_S
from pagemesh.shared.leases import Lease

PROMPT = [3, 4, 5, 6, 7]


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


async def work_for(scheduler: Scheduler, name: str, *, held: bool = False) -> FakeWorker:
    return await scheduler.worker(name, make_card(), make_capacity(), held=held)


async def leases(scheduler: Scheduler, *workers: str) -> list[Lease]:
    found = await scheduler.registry.leases.read(workers)
    return [found[name] for name in workers]


async def answered(tokenizer: FakeTokenizer, key: int, engine: str) -> None:
    answer = tokenizer.submit(make_submit(key, PROMPT), engine)
    await tokenizer.until_over(answer)
    assert answer.ids == expected_answer(PROMPT, 8)


async def until_each_has_one(*tokenizers: FakeTokenizer) -> None:
    await asyncio.gather(*(each.until(lambda t=each: len(t.engines) == 1) for each in tokenizers))


async def two_with_two_workers(
    start: Start,
) -> tuple[list[Scheduler], list[FakeTokenizer], list[FakeWorker]]:
    """Each scheduler with one engine and a tokenizer of its own."""
    schedulers = [await start(), await start()]
    tokenizers = [await each.tokenizer() for each in schedulers]
    workers = [await work_for(schedulers[0], name) for name in ("worker-1", "worker-2")]
    await until_each_has_one(*tokenizers)
    return schedulers, tokenizers, workers


async def test_each_worker_has_one_scheduler_and_each_scheduler_its_share(start: Start) -> None:
    schedulers, tokenizers, workers = await two_with_two_workers(start)
    engines = [tokenizer.engines[0].engine_id for tokenizer in tokenizers]
    assert sorted(engines) == ["worker-1", "worker-2"]
    for tokenizer, engine in zip(tokenizers, engines, strict=True):
        await answered(tokenizer, 1, engine)
    held = await leases(schedulers[0], *engines)
    assert [lease.holder for lease in held] == [each.name for each in schedulers]
    terms = {worker.name: worker.link and worker.link.peer.lease_term for worker in workers}
    assert [terms[engine] for engine in engines] == [lease.term for lease in held]


async def test_workers_of_a_dead_scheduler_are_taken_before_its_key_has_lapsed(
    start: Start,
) -> None:
    (dies, lives), (_, tokenizer), _ = await two_with_two_workers(start)
    before = tokenizer.engines[0].engine_id
    await dies.die()
    await tokenizer.until_engines("worker-1", "worker-2")
    assert dies.name in [each.instance_id for each in await lives.registry.instances("scheduler")]
    await answered(tokenizer, 1, "worker-1")
    await answered(tokenizer, 2, "worker-2")
    assert before in ("worker-1", "worker-2")


async def test_a_newcomer_gets_an_idle_worker_and_a_busy_one_stays(start: Start) -> None:
    first = await start()
    tokenizer = await first.tokenizer()
    busy = await work_for(first, "worker-2", held=True)
    await work_for(first, "worker-1")
    await tokenizer.until_engines("worker-1", "worker-2")
    answer = tokenizer.submit(make_submit(1, PROMPT), "worker-2")
    await busy.until_steps(1)
    [lease] = await leases(first, "worker-2")
    second = await start()
    newcomer = await second.tokenizer()
    await newcomer.until_engines("worker-1")
    await tokenizer.until_engines("worker-2")
    busy.resume()
    await tokenizer.until_over(answer)
    await answered(newcomer, 1, "worker-1")
    assert answer.ids == expected_answer(PROMPT, 8)
    assert tokenizer.lost == []
    assert await leases(first, "worker-2") == [lease]


async def test_nothing_moves_when_redis_forgets_everything(
    start: Start, client: redis.asyncio.Redis, mesh_name: str
) -> None:
    schedulers, tokenizers, workers = await two_with_two_workers(start)
    before = await leases(schedulers[0], "worker-1", "worker-2")
    links = [worker.link for worker in workers]
    await client.delete(*await client.keys(f"{mesh_name}:*"))
    for key in range(20):
        for tokenizer in tokenizers:
            await answered(tokenizer, key, tokenizer.engines[0].engine_id)
        await asyncio.sleep(RETURN_S / 10)
    assert await leases(schedulers[0], "worker-1", "worker-2") == before
    assert [worker.link for worker in workers] == links


async def test_a_lease_that_another_took_changes_nothing_while_the_link_lives(
    start: Start, client: redis.asyncio.Redis, mesh_name: str
) -> None:
    scheduler = await start()
    tokenizer = await scheduler.tokenizer()
    worker = await work_for(scheduler, "worker-1")
    await tokenizer.until_engines("worker-1")
    [ours] = await leases(scheduler, "worker-1")
    while (taken := await scheduler.registry.leases.claim("worker-1", "intruder")) is None:
        await client.delete(f"{mesh_name}:lease:worker-1")
    link = worker.link
    await asyncio.sleep(1.0)  # some looks of the scheduler's
    await answered(tokenizer, 1, "worker-1")
    assert worker.link is link
    await scheduler.registry.leases.release("worker-1", taken)
    while await leases(scheduler, "worker-1") != [ours]:
        pass


async def test_a_scheduler_that_a_worker_refuses_gives_the_lease_back(
    start: Start, log_lines: list[EventDict]
) -> None:
    scheduler = await start()
    read = scheduler.registry.leases.read
    why = "another commands this worker"
    await scheduler.worker("worker-1", make_card(), make_capacity(), refuse=why)
    while "" not in [each.holder for each in (await read(["worker-1"])).values()]:
        pass
    assert any(line.get("reason") == why for line in log_lines)


async def test_who_has_no_worker_stands_by_and_is_ready(start: Start) -> None:
    schedulers = [await start(), await start()]
    assert [(await each.get("/ready"))[0] for each in schedulers] == [503, 503]
    tokenizers = [await each.tokenizer() for each in schedulers]
    await work_for(schedulers[0], "worker-1")
    linked = [asyncio.create_task(each.until_engines("worker-1")) for each in tokenizers]
    await asyncio.wait(linked, return_when=asyncio.FIRST_COMPLETED)
    assert [task.done() for task in linked].count(True) == 1
    for each in schedulers:
        while (await each.get("/ready"))[0] != 200:
            pass
    for task in linked:
        task.cancel()


async def test_a_scheduler_that_drains_hands_its_idle_workers_over(start: Start) -> None:
    (leaves, _), (old, tokenizer), workers = await two_with_two_workers(start)
    assert leaves.service is not None
    mine = old.engines[0].engine_id
    busy = next(worker for worker in workers if worker.name == mine)
    busy.held = True
    answer = old.submit(make_submit(1, PROMPT), mine)
    await busy.until_steps(1)
    drained = asyncio.create_task(leaves.service.drain())
    await old.until(lambda: old.draining)
    busy.resume()
    await old.until_over(answer)
    await drained
    await tokenizer.until_engines("worker-1", "worker-2")
    await answered(tokenizer, 1, mine)

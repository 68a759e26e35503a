"""Who commands the worker, and what costs a scheduler its link."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from worker_harness import GREEDY, alone, tiny_runner
from worker_service_harness import PROMPT, Worker, driver, gated

from pagemesh.shared.engine_messages import NeedSnapshot, Step
from pagemesh.shared.errors import HandshakeRefused
from pagemesh.shared.registry import Registry
from pagemesh.worker_svc.landing import Landing
from pagemesh.worker_svc.models.decoder import Decoder
from pagemesh.worker_svc.service import MAX_QUEUED_STEPS


async def test_a_runner_that_breaks_costs_its_scheduler_the_link(
    start: Callable, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Step) -> Landing:
        raise AssertionError("a bug")

    runner = tiny_runner(decoder)
    async with start(lambda _settings, _report: runner) as worker:
        async with worker.scheduler() as scheduler:
            await scheduler.engines()
            with monkeypatch.context() as patch:
                patch.setattr(runner, "launch", broken)
                scheduler.link.send(driver().plan({}))
                assert await scheduler.ended()
        async with worker.scheduler() as scheduler:
            await scheduler.engines()
            scheduler.link.send(driver().plan({}))
            assert await scheduler.tokens() == []


async def test_a_scheduler_commands_for_as_long_as_its_link_lives(
    worker: Worker, decoder: Decoder
) -> None:
    async with worker.scheduler("old", term=5) as old:
        assert len((await old.engines()).engines) == 1
        with pytest.raises(HandshakeRefused, match="old commands this worker"):
            async with worker.scheduler("young", term=6):
                pass
        books = driver()
        books.enter(0, PROMPT)
        old.link.send(books.plan({0: 4}))
        assert await old.tokens() == alone(decoder, PROMPT, GREEDY, 1)


async def test_the_next_scheduler_begins_with_an_empty_batch_and_the_last_is_refused(
    worker: Worker, decoder: Decoder
) -> None:
    async with worker.scheduler("old", term=5) as old:
        await old.engines()
        books = driver()
        books.enter(0, PROMPT)
        old.link.send(books.plan({0: 4}))
        await old.tokens()
    async with worker.scheduler("young", term=6) as young:
        assert len((await young.engines()).engines) == 1
        theirs = driver(epoch=7)
        theirs.enter(0, PROMPT[1:])
        young.link.send(theirs.plan({0: 3}))
        assert await young.tokens() == alone(decoder, PROMPT[1:], GREEDY, 1)
    with pytest.raises(HandshakeRefused, match="its lease, of term 5, is over: 6 has commanded"):
        async with worker.scheduler("old", term=5):
            pass


async def test_the_lease_is_free_as_soon_as_the_link_of_its_holder_ends(
    worker: Worker, redis_url: str, mesh_name: str
) -> None:
    registry = Registry(redis_url, mesh_name)
    [instance] = await registry.instances("worker")
    name = instance.instance_id
    lease = await registry.leases.claim(name, "old")
    assert lease is not None
    async with worker.scheduler("old", term=lease.term) as old:
        await old.engines()
        assert await registry.leases.claim(name, "young") is None
    while (young := await registry.leases.claim(name, "young")) is None:
        pass
    assert young.term > lease.term
    await registry.close()


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
    async with gated(start, decoder) as (gate, worker, scheduler, books):
        for work in ({0: 4}, *({} for _ in range(MAX_QUEUED_STEPS))):
            scheduler.link.send(books.plan(work))
        assert await scheduler.ended()
        gate.open.set()
        async with worker.scheduler("other", term=2) as other:
            await other.engines()
            other.link.send(driver().plan({}))
            assert await other.tokens() == []

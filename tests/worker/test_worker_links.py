"""Who commands the worker, and what costs a scheduler its link."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from worker_harness import GREEDY, alone, tiny_runner
from worker_service_harness import PROMPT, Worker, driver, gated

from pagemesh.shared.engine_messages import NeedSnapshot, Step
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
    async with gated(start, decoder) as (gate, worker, scheduler, books):
        for work in ({0: 4}, *({} for _ in range(MAX_QUEUED_STEPS))):
            scheduler.link.send(books.plan(work))
        assert await scheduler.ended()
        gate.open.set()
        async with worker.scheduler("other") as other:
            await other.engines()
            other.link.send(driver().plan({}))
            assert await other.tokens() == []

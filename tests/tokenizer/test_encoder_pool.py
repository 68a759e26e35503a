"""The threads that encode: bounded, and never in the way of the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from pagemesh.shared.errors import RequestError
from pagemesh.tokenizer_svc import encoder_pool
from pagemesh.tokenizer_svc.encoder_pool import EncoderPool


@pytest.fixture
async def pool() -> AsyncIterator[EncoderPool]:
    """Two threads."""
    pool = EncoderPool("encoder", max_threads=2)
    yield pool
    pool.close()


async def test_calls_run_beside_the_loop_and_one_another(pool: EncoderPool) -> None:
    met = threading.Barrier(3, timeout=30)
    calls = [asyncio.create_task(pool.run(met.wait)) for _ in range(2)]
    await asyncio.to_thread(met.wait)
    assert len(await asyncio.gather(*calls)) == 2
    assert pool.waiting == 0


async def test_too_many_waiting_prompts_are_turned_away(
    pool: EncoderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder_pool, "MAX_WAITING", 1)
    release = threading.Event()
    first = asyncio.create_task(pool.run(release.wait, 30))
    await asyncio.sleep(0)
    with pytest.raises(RequestError) as caught:
        await pool.run(str, 5)
    assert caught.value.status == 429
    release.set()
    assert await first
    assert await pool.run(str, 5) == "5"


async def test_a_cancelled_call_counts_until_its_thread_is_free(pool: EncoderPool) -> None:
    started, release = threading.Barrier(3, timeout=30), threading.Event()
    ran: list[str] = []

    def work() -> None:
        started.wait()
        release.wait(30)

    running = [asyncio.create_task(pool.run(work)) for _ in range(2)]
    await asyncio.to_thread(started.wait)
    queued = asyncio.create_task(pool.run(ran.append, "queued"))
    await asyncio.sleep(0)
    assert pool.waiting == 3
    for task in [*running, queued]:
        task.cancel()
    await asyncio.gather(*running, queued, return_exceptions=True)
    assert pool.waiting == 2
    release.set()
    assert await pool.run(str, 5) == "5"
    assert await pool.run(str, 6) == "6"
    while pool.waiting:
        await asyncio.to_thread(release.wait)
    assert ran == []


async def test_an_error_reaches_the_caller(pool: EncoderPool) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        await pool.run(int, "x")
    assert pool.waiting == 0

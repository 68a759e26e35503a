"""The threads that encode: bounded, and never in the way of the loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from pagemesh.shared.errors import RequestError
from pagemesh.tokenizer_svc import encoder_pool
from pagemesh.tokenizer_svc.encoder_pool import EncoderPool


async def test_calls_run_beside_the_loop_and_one_another() -> None:
    pool, met = EncoderPool(), threading.Barrier(3, timeout=30)
    calls = [asyncio.create_task(pool.run(met.wait)) for _ in range(2)]
    await asyncio.to_thread(met.wait)
    assert len(await asyncio.gather(*calls)) == 2
    assert pool.waiting == 0
    pool.close()


async def test_too_many_waiting_prompts_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_pool, "MAX_WAITING", 1)
    pool, release = EncoderPool(), threading.Event()
    first = asyncio.create_task(pool.run(release.wait, 30))
    await asyncio.sleep(0)
    with pytest.raises(RequestError) as caught:
        await pool.run(str, 5)
    assert caught.value.status == 429
    release.set()
    assert await first
    assert await pool.run(str, 5) == "5"
    pool.close()


async def test_an_error_reaches_the_caller() -> None:
    pool = EncoderPool()
    with pytest.raises(ValueError, match="invalid literal"):
        await pool.run(int, "x")
    assert pool.waiting == 0
    pool.close()

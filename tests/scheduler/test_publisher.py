"""The scheduler service tells the prefix index in a real Valkey what its engines hold."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError
from scheduler_helpers import make_capacity, make_card, make_submit
from service_harness import FakeTokenizer, Scheduler, Start
from structlog.typing import EventDict

from pagemesh.scheduler_svc import publisher
from pagemesh.shared.hashing import chain_hashes
from pagemesh.shared.prefix_index import Claim, PrefixIndex, Standing, index_keys
from pagemesh.shared.wire import pack_ids

CARD = make_card()
PROMPT = list(range(3, 3 + 6 * CARD.block_tokens))
KEYS = index_keys(b"".join(chain_hashes(pack_ids(PROMPT), CARD.block_tokens)), CARD)


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        yield client


async def linked(start: Start) -> tuple[Scheduler, FakeTokenizer]:
    scheduler = await start()
    await scheduler.worker("worker-1", CARD, make_capacity())
    tokenizer = await scheduler.tokenizer()
    await tokenizer.until_engines("worker-1")
    return scheduler, tokenizer


def number(tokenizer: FakeTokenizer) -> int:
    """The engine's, as it is reported; 0 until it has one."""
    return tokenizer.engines[0].stats.index_number if tokenizer.engines else 0


async def until_depths(index: PrefixIndex, expected: Callable[[], dict[int, int]]) -> None:
    """Asked again and again: Redis tells nobody."""
    while await index.depths(KEYS) != expected():
        pass


async def test_confirmed_blocks_are_in_the_index_under_the_number_reported(start: Start) -> None:
    scheduler, tokenizer = await linked(start)
    answer = tokenizer.submit(make_submit(1, PROMPT, max_tokens=1), "worker-1")
    await tokenizer.until_over(answer)
    await tokenizer.until(lambda: number(tokenizer))
    await until_depths(scheduler.registry.prefix_index, lambda: {number(tokenizer): 6})


async def test_a_flushed_index_fills_again(
    start: Start, client: redis.asyncio.Redis, mesh_name: str
) -> None:
    scheduler, tokenizer = await linked(start)
    await tokenizer.until_over(tokenizer.submit(make_submit(1, PROMPT, max_tokens=1), "worker-1"))
    await tokenizer.until(lambda: number(tokenizer))
    index = scheduler.registry.prefix_index
    await until_depths(index, lambda: {number(tokenizer): 6})
    await client.delete(*await client.keys(f"{mesh_name}:prefix:*"))
    await until_depths(index, lambda: {number(tokenizer): 6})


async def test_a_number_that_is_anothers_is_given_up(
    start: Start, client: redis.asyncio.Redis, mesh_name: str
) -> None:
    scheduler, tokenizer = await linked(start)
    await tokenizer.until(lambda: number(tokenizer))
    first = number(tokenizer)
    await client.set(f"{mesh_name}:prefix:engine:{first}", "a stranger", px=60_000)
    await tokenizer.until(lambda: number(tokenizer) not in (0, first))
    index = scheduler.registry.prefix_index
    stranger = Claim(first, "a stranger")
    assert await index.publish(stranger, b"", b"") is Standing.OURS
    await tokenizer.until_over(tokenizer.submit(make_submit(1, PROMPT, max_tokens=1), "worker-1"))
    await until_depths(index, lambda: {number(tokenizer): 6})


async def test_requests_run_and_blocks_are_told_later_while_redis_is_away(
    start: Start, monkeypatch: pytest.MonkeyPatch, log_lines: list[EventDict]
) -> None:
    async def away(*_: object) -> None:
        raise RedisConnectionError("gone")

    monkeypatch.setattr(publisher, "BACKOFF_S", 0.05)
    scheduler, tokenizer = await linked(start)
    await tokenizer.until(lambda: number(tokenizer))
    assert scheduler.service is not None
    index = scheduler.service._publisher._index
    with monkeypatch.context() as broken:
        broken.setattr(index, "publish", away)
        broken.setattr(index, "rewrite", away)
        answer = tokenizer.submit(make_submit(1, PROMPT, max_tokens=1), "worker-1")
        await tokenizer.until_over(answer)
        while not await counted(scheduler, "pagemesh_index_dropped_blocks_total"):
            pass
        assert await scheduler.registry.prefix_index.depths(KEYS) == {}
    await until_depths(scheduler.registry.prefix_index, lambda: {number(tokenizer): 6})
    assert await counted(scheduler, "pagemesh_index_dropped_blocks_total") == 6
    assert await counted(scheduler, "pagemesh_index_publish_failures_total") >= 1
    told = [line["event"] for line in log_lines if line["event"].startswith("prefix_index")]
    assert told == ["prefix_index_away", "prefix_index_back"]


async def counted(scheduler: Scheduler, name: str) -> float:
    _, text = await scheduler.get("/metrics")
    [line] = [line for line in text.splitlines() if line.startswith(f"{name} ")]
    return float(line.rpartition(" ")[2])

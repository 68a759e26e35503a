"""The registry against a real Valkey."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError
from structlog.testing import capture_logs

from pagemesh.shared.registry import (
    HEARTBEAT_S,
    KEY_TTL_S,
    WHOLE_LOOK_S,
    Instance,
    Load,
    Registry,
    masked_url,
)
from pagemesh.shared.wire import PROTOCOL

WORKER = Instance("worker", "worker-1", "127.0.0.1:5000", 1)
NOBODY = "redis://127.0.0.1:1"


@pytest.fixture
async def registry(redis_url: str, mesh_name: str) -> AsyncIterator[Registry]:
    registry = Registry(redis_url, mesh_name)
    yield registry
    await registry.close()


@pytest.fixture
async def keys(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        yield client


async def announced(registry: Registry, instance: Instance) -> asyncio.Task[None]:
    """Announce until the instance is seen; the task goes on."""
    task = asyncio.create_task(registry.announce(instance))
    async for instances in registry.watch(instance.service):
        if instance in instances:
            return task
    raise AssertionError("watch ended")


async def test_an_announced_instance_is_found(registry: Registry) -> None:
    task = await announced(registry, WORKER)
    assert await registry.instances("worker") == [WORKER]
    assert await registry.instances("scheduler") == []
    task.cancel()


async def test_its_load_beats_beside_it(registry: Registry) -> None:
    rows = iter(range(1, 99))
    task = asyncio.create_task(registry.announce(WORKER, lambda: Load(next(rows), 256)))
    async for instances in registry.watch("worker"):
        if instances:
            break
    assert await registry.loads("worker") == {"worker-1": Load(1, 256)}
    await asyncio.sleep(1.5 * HEARTBEAT_S)
    assert (await registry.loads("worker"))["worker-1"].in_flight > 1
    task.cancel()
    await registry.withdraw(WORKER)
    assert await registry.loads("worker") == {}


async def test_a_key_lives_no_longer_than_its_ttl(
    registry: Registry, keys: redis.asyncio.Redis, mesh_name: str
) -> None:
    task = await announced(registry, WORKER)
    task.cancel()
    left_ms = await keys.pttl(f"{mesh_name}:instance:worker:worker-1")
    assert 0 < left_ms <= KEY_TTL_S * 1000


async def test_an_expired_key_is_nobody_and_leaves_the_set(
    registry: Registry, keys: redis.asyncio.Redis, mesh_name: str
) -> None:
    task = await announced(registry, WORKER)
    task.cancel()
    await keys.delete(f"{mesh_name}:instance:worker:worker-1")
    assert await registry.instances("worker") == []
    assert await keys.smembers(f"{mesh_name}:instances:worker") == set()


async def test_withdrawn_is_gone_at_once(registry: Registry) -> None:
    task = await announced(registry, WORKER)
    task.cancel()
    await registry.withdraw(WORKER)
    assert await registry.instances("worker") == []


async def test_another_protocol_is_not_seen(
    registry: Registry, keys: redis.asyncio.Redis, mesh_name: str
) -> None:
    old = WORKER._replace(instance_id="worker-0", protocol=PROTOCOL + 1)
    tasks = [asyncio.create_task(registry.announce(old)), await announced(registry, WORKER)]
    assert await keys.exists(f"{mesh_name}:instance:worker:worker-0")
    assert await registry.instances("worker") == [WORKER]
    for task in tasks:
        task.cancel()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ('["worker", "worker-0", "127.0.0.1:1", 1, 99, "new"]', "protocol 99 is not"),
        ('["worker", "worker-0", 17]', "no instance"),
        ('{"service": "worker"}', "no instance"),
        ("not JSON", "no instance"),
        ("", "no instance"),
    ],
)
async def test_who_cannot_be_spoken_with_is_passed_over_and_told_once(
    registry: Registry, keys: redis.asyncio.Redis, mesh_name: str, value: str, reason: str
) -> None:
    await keys.sadd(f"{mesh_name}:instances:worker", "worker-0")
    await keys.set(f"{mesh_name}:instance:worker:worker-0", value)
    with capture_logs() as logs:
        task = await announced(registry, WORKER)
        assert await registry.instances("worker") == [WORKER]
    task.cancel()
    (line,) = [entry for entry in logs if entry["event"] == "instance_passed_over"]
    assert line["instance"] == "worker-0"
    assert reason in line["reason"]


async def test_fields_that_another_version_appends_are_left_alone(
    registry: Registry, keys: redis.asyncio.Redis, mesh_name: str
) -> None:
    await keys.sadd(f"{mesh_name}:instances:worker", "worker-1")
    value = msgspec.json.encode([*WORKER, "new"])
    await keys.set(f"{mesh_name}:instance:worker:worker-1", value)
    assert await registry.instances("worker") == [WORKER]


async def test_meshes_do_not_see_each_other(registry: Registry, redis_url: str) -> None:
    task = await announced(registry, WORKER)
    other = Registry(redis_url, "another")
    assert await other.instances("worker") == []
    await other.close()
    task.cancel()


async def test_watch_tells_changes_only(registry: Registry) -> None:
    watching = registry.watch("worker")
    assert await anext(watching) == []
    task = asyncio.create_task(registry.announce(WORKER))
    assert await anext(watching) == [WORKER]
    task.cancel()
    await registry.withdraw(WORKER)
    assert await anext(watching) == []


async def test_without_redis_nothing_raises_but_the_questions() -> None:
    registry = Registry(NOBODY, "m")
    announcing = asyncio.create_task(registry.announce(WORKER))
    await registry.withdraw(WORKER)
    assert registry.away
    with pytest.raises(RedisConnectionError):
        await registry.ping()
    with pytest.raises(RedisConnectionError):
        await registry.instances("worker")
    assert not announcing.done()
    announcing.cancel()
    await registry.close()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:1/0", "redis://h:1/0"),
        ("redis://:pw@h:1", "redis://:********@h:1"),
        ("rediss://user:p%40w@h", "rediss://user:********@h"),
        ("unix:///tmp/s?password=pw&db=1", "unix:///tmp/s?password=********&db=1"),
        (
            "rediss://h?ssl_keyfile=k&ssl_password=pw",
            "rediss://h?ssl_keyfile=k&ssl_password=********",
        ),
    ],
)
def test_passwords_are_masked(url: str, shown: str) -> None:
    assert masked_url(url) == shown


async def test_models_are_shown_with_the_instance(registry: Registry) -> None:
    serving = WORKER._replace(models=["small", "org/large"])
    task = await announced(registry, serving)
    assert (await registry.instances("worker"))[0].models == ["small", "org/large"]
    task.cancel()


async def test_newcomers_and_leavers_are_seen_at_the_next_look(registry: Registry) -> None:
    assert await registry.latest("worker") == []
    task = asyncio.create_task(registry.announce(WORKER))
    async with asyncio.timeout(WHOLE_LOOK_S / 2):
        while await registry.latest("worker") != [WORKER]:
            pass
    task.cancel()
    await registry.withdraw(WORKER)
    assert await registry.latest("worker") == []


async def test_a_look_at_what_did_not_change_reads_no_keys_but_lapsed_ones_are_noticed(
    registry: Registry, keys: redis.asyncio.Redis, mesh_name: str
) -> None:
    task = await announced(registry, WORKER)
    task.cancel()
    await registry.latest("worker")
    await keys.delete(f"{mesh_name}:instance:worker:worker-1")
    assert await registry.latest("worker") == [WORKER]
    async with asyncio.timeout(2 * WHOLE_LOOK_S + 1):
        while await registry.latest("worker"):  # noqa: ASYNC110 -- keys that lapse tell nobody
            await asyncio.sleep(0.05)

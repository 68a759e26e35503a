"""Leases in a real Valkey."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError

from pagemesh.shared.leases import LEASE_TTL_S, Lease, LeaseKeys
from pagemesh.shared.registry import Registry

NOBODY = "redis://127.0.0.1:1"


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


@pytest.fixture
async def leases(redis_url: str, mesh_name: str) -> AsyncIterator[LeaseKeys]:
    registry = Registry(redis_url, mesh_name)
    yield registry.leases
    await registry.close()


async def claimed(leases: LeaseKeys, worker: str, holder: str) -> Lease:
    lease = await leases.claim(worker, holder)
    assert lease is not None
    return lease


async def test_of_all_who_claim_one_gets_the_lease(leases: LeaseKeys) -> None:
    answers = await asyncio.gather(*(leases.claim("w", f"s{number}") for number in range(8)))
    [won] = [answer for answer in answers if answer is not None]
    assert await leases.read(["w", "other"]) == {"w": won}
    assert await leases.read([]) == {}


async def test_a_lease_lapses_unless_it_is_renewed(
    leases: LeaseKeys, client: redis.asyncio.Redis, mesh_name: str
) -> None:
    key = f"{mesh_name}:lease:w"
    lease = await claimed(leases, "w", "s1")
    assert 0 < await client.pttl(key) <= LEASE_TTL_S * 1000
    await client.pexpire(key, 50)
    await leases.renew({"w": lease})
    assert await client.pttl(key) > 50
    await client.delete(key)
    await leases.renew({"w": lease, "v": Lease(1, "s1")})
    assert await leases.read(["v", "w"]) == {"v": Lease(1, "s1"), "w": lease}
    await leases.renew({})


async def test_another_holders_lease_is_neither_renewed_nor_released(leases: LeaseKeys) -> None:
    old = await claimed(leases, "w", "s1")
    await leases.release("w", old)
    young = await claimed(leases, "w", "s2")
    await leases.renew({"w": old})
    await leases.release("w", old)
    assert await leases.read(["w"]) == {"w": young}
    assert young.term > old.term


async def test_a_released_lease_is_free_at_once_and_its_holder_may_have_it_back(
    leases: LeaseKeys,
) -> None:
    lease = await claimed(leases, "w", "s1")
    await leases.release("w", lease)
    assert await leases.read(["w"]) == {"w": Lease(lease.term, "")}
    await leases.renew({"w": lease})
    assert await leases.claim("w", "s2") is None


async def test_terms_grow_even_if_redis_forgets(
    leases: LeaseKeys, client: redis.asyncio.Redis, mesh_name: str
) -> None:
    terms = [(await claimed(leases, f"w{number}", "s1")).term for number in range(50)]
    await asyncio.sleep(0.1)  # for the clock to pass the counter, as any restart lets it
    await client.delete(f"{mesh_name}:lease_term", f"{mesh_name}:lease:w0")
    terms.append((await claimed(leases, "w0", "s2")).term)
    assert terms == sorted(set(terms))


async def test_without_redis_every_call_raises() -> None:
    registry = Registry(NOBODY, "m")
    lease = Lease(1, "s")
    for call in (
        registry.leases.read(["w"]),
        registry.leases.claim("w", "s"),
        registry.leases.renew({"w": lease}),
        registry.leases.release("w", lease),
    ):
        with pytest.raises(RedisConnectionError):
            await call
    await registry.close()

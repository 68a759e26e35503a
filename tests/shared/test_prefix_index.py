"""The prefix index's scripts in a real Valkey."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import pytest
import redis
import redis.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagemesh.shared.hashing import chain_hashes
from pagemesh.shared.messages import ModelCard
from pagemesh.shared.prefix_index import (
    MAX_HOLDERS,
    N_FIRST,
    REGISTRATION_S,
    Claim,
    PrefixIndex,
    Standing,
    first_bytes,
    index_keys,
)
from pagemesh.shared.registry import Registry

CARD: Final = ModelCard(["m"], 100, 4096, 4, "float32", [2], 1, "f00d", 1)
NOBODY: Final = "redis://127.0.0.1:1"


def chain(n_blocks: int, salt: str = "", card: ModelCard = CARD) -> bytes:
    """The keys of a prompt of `n_blocks`."""
    return index_keys(b"".join(chain_hashes(bytes(16 * n_blocks), 4, salt=salt)), card)


@pytest.fixture
async def index(redis_url: str, mesh_name: str) -> AsyncIterator[PrefixIndex]:
    registry = Registry(redis_url, mesh_name)
    yield registry.prefix_index
    await registry.close()


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        yield client


async def rewritten(index: PrefixIndex, claim: Claim, held: bytes) -> None:
    """One whole walk."""
    keys = [held[i : i + 8] for i in range(0, len(held), 8)]
    for first in range(N_FIRST):
        second = 0
        while second < N_FIRST:
            here = b"".join(key for key in keys if key[0] == first and key[1] >= second)
            standing, second = await index.rewrite(claim, first, second, here)
            assert standing is Standing.OURS


async def test_the_index_says_how_much_of_a_chain_each_engine_holds(index: PrefixIndex) -> None:
    keys, (a, b) = chain(100), [await index.claim(owner) for owner in "ab"]
    assert await index.depths(keys) == {}
    assert await index.publish(a, keys[: 8 * 61], b"") is Standing.OURS
    await index.publish(b, keys[: 8 * 7], b"")
    assert await index.depths(keys) == {a.number: 61, b.number: 7}
    assert await index.depths(keys[: 8 * 5]) == {a.number: 5, b.number: 5}
    assert await index.depths(b"") == {}
    await index.publish(a, b"", keys[8 * 3 : 8 * 61])
    assert await index.depths(keys) == {a.number: 3, b.number: 7}


async def test_publishing_twice_changes_nothing(
    index: PrefixIndex, client: redis.asyncio.Redis, mesh_name: str
) -> None:
    keys, claim = chain(4), await index.claim("a")
    for _ in range(2):
        await index.publish(claim, keys + keys, b"")
    shard = f"{mesh_name}:prefix:".encode() + keys[:2]
    assert await client.hgetall(shard) == {keys[2:8]: claim.number.to_bytes(2, "big")}
    for _ in range(2):
        await index.publish(claim, b"", keys + keys)
    assert await client.keys(f"{mesh_name}:prefix:??") == []


async def test_salts_models_and_block_sizes_never_meet(index: PrefixIndex) -> None:
    claim = await index.claim("a")
    await index.publish(claim, chain(8), b"")
    strangers = (
        chain(8, salt="pepper"),
        chain(8, card=CARD._replace(fingerprint="beef")),
        chain(8, card=CARD._replace(block_tokens=8)),
    )
    for keys in strangers:
        assert await index.depths(keys) == {}
    assert await index.depths(chain(8, card=CARD._replace(names=["other"]))) == {claim.number: 8}


def test_a_key_begins_as_its_hash_says() -> None:
    hashes = b"".join(chain_hashes(bytes(16 * 3), 4))
    keys = index_keys(hashes, CARD)
    assert len(keys) == 3 * 8
    assert [keys[8 * i] for i in range(3)] == [first_bytes(CARD)[hashes[16 * i]] for i in range(3)]
    assert sorted(first_bytes(CARD)) == list(range(N_FIRST))


async def test_a_number_belongs_to_who_claimed_it(
    index: PrefixIndex, client: redis.asyncio.Redis, mesh_name: str
) -> None:
    keys, claim = chain(4), await index.claim("a")
    key = f"{mesh_name}:prefix:engine:{claim.number}"
    assert 0 < await client.pttl(key) <= REGISTRATION_S * 1000
    thief = Claim(claim.number, "b")
    assert await index.publish(thief, keys, b"") is Standing.TAKEN
    assert await index.rewrite(thief, 0, 0, b"") == (Standing.TAKEN, 0)
    assert await index.depths(keys) == {}
    await client.pexpire(key, 100)
    await index.publish(claim, b"", b"")
    assert await client.pttl(key) > 100


async def test_after_a_flush_numbers_are_claimed_again_and_nobody_takes_anothers(
    index: PrefixIndex, client: redis.asyncio.Redis, mesh_name: str
) -> None:
    keys, (a, b) = chain(4), [await index.claim(owner) for owner in "ab"]
    await client.delete(*await client.keys(f"{mesh_name}:*"))
    assert await index.publish(b, keys, b"") is Standing.FORGOTTEN
    assert await index.publish(b, keys, b"") is Standing.OURS
    newcomers = [await index.claim(owner) for owner in "cd"]
    assert b.number not in [each.number for each in newcomers]
    assert await index.publish(a, keys, b"") is Standing.TAKEN
    assert await index.depths(keys) == {b.number: 4}


async def test_a_walk_rewrites_what_an_engine_really_holds(
    index: PrefixIndex, client: redis.asyncio.Redis, mesh_name: str
) -> None:
    """What is missing enters, what is stale leaves, others' stays, and that of the dead goes."""
    claims = [await index.claim(owner) for owner in "abc"]
    ours, other, dead = claims
    held, stale, lost = chain(40), chain(40, "stale"), chain(40, "lost")
    await index.publish(ours, held + stale, b"")
    await index.publish(other, stale + lost, b"")
    await index.publish(dead, held + lost, b"")
    await client.delete(f"{mesh_name}:prefix:engine:{dead.number}")
    await rewritten(index, ours, held + lost)
    assert await index.depths(held) == {ours.number: 40}
    assert await index.depths(stale) == {other.number: 40}
    assert await index.depths(lost) == {ours.number: 40, other.number: 40}


async def test_a_rewriting_is_bounded_and_says_where_to_go_on(
    index: PrefixIndex, client: redis.asyncio.Redis, mesh_name: str
) -> None:
    claim = await index.claim("a")
    keys = [
        b"\x07" + second.to_bytes() + number.to_bytes(6)
        for second in (4, 12)
        for number in range(1200)
    ]
    await index.publish(claim, b"".join(keys), b"")
    assert await index.rewrite(claim, 7, 0, b"".join(keys)) == (Standing.OURS, 8)
    assert await index.rewrite(claim, 7, 8, b"") == (Standing.OURS, 16)
    assert await index.rewrite(claim, 7, 16, b"") == (Standing.OURS, N_FIRST)
    prefix = f"{mesh_name}:prefix:".encode() + b"\x07"
    assert [await client.hlen(prefix + second) for second in (b"\x04", b"\x0c")] == [1200, 0]


async def test_a_block_lists_a_bounded_number_of_engines(index: PrefixIndex) -> None:
    """Who is not listed at the beginning is found deeper in the chain."""
    keys = chain(20)
    claims = [await index.claim(f"e{number}") for number in range(MAX_HOLDERS + 1)]
    for claim in claims[:-1]:
        await index.publish(claim, keys[: 8 * 3], b"")
    await index.publish(claims[-1], keys, b"")
    depths = await index.depths(keys)
    assert len(depths) == MAX_HOLDERS + 1
    assert depths.pop(claims[-1].number) == 20
    assert set(depths.values()) == {3}


async def test_a_packed_shard_stays_packed(
    index: PrefixIndex, client: redis.asyncio.Redis, mesh_name: str
) -> None:
    keys = b"".join(b"\x01\x02" + number.to_bytes(6) for number in range(400))
    for number in range(MAX_HOLDERS):
        await index.publish(await index.claim(f"e{number}"), keys, b"")
    shard = f"{mesh_name}:prefix:".encode() + b"\x01\x02"
    assert await client.object("encoding", shard) == b"listpack"


@given(depths=st.lists(st.integers(0, 70), max_size=8), n_blocks=st.integers(1, 70))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_galloping_equals_a_linear_scan(
    redis_url: str, mesh_name: str, depths: list[int], n_blocks: int
) -> None:
    async def check() -> None:
        registry = Registry(redis_url, mesh_name)
        index, keys = registry.prefix_index, chain(70)
        claims = [await index.claim(f"e{number}") for number in range(len(depths))]
        for claim, depth in zip(claims, depths, strict=True):
            await index.publish(claim, keys[: 8 * depth], b"")
        scanned = {
            claim.number: min(depth, n_blocks)
            for claim, depth in zip(claims, depths, strict=True)
            if depth
        }
        found = await index.depths(keys[: 8 * n_blocks])
        for claim in claims:
            await index.publish(claim, b"", keys)
        await registry.close()
        assert found == scanned

    asyncio.run(check())


async def test_redis_away_raises(mesh_name: str) -> None:
    registry = Registry(NOBODY, mesh_name)
    with pytest.raises(redis.ConnectionError):
        await registry.prefix_index.depths(chain(1))
    await registry.close()

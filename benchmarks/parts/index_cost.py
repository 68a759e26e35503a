"""Memory and time of the prefix index in a Valkey of its own."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Final

from redis.asyncio import Redis

from pagemesh.shared.messages import ModelCard
from pagemesh.shared.prefix_index import KEY_BYTES, N_FIRST, Claim, PrefixIndex, index_keys
from pagemesh.shared.settings import Settings
from parts.services import supervised

CARD: Final = ModelCard(["m"], 100, 4096, 16, "float32", [2], 1, "f00d", 1)
CALL_BLOCKS: Final = (1, 16, 64, 256)
CHAIN_BLOCKS: Final = (1, 8, 64, 512, 4096)
ENGINES: Final = (1, 8, 30)
Layout = Callable[[Redis, int], Awaitable[None]]


async def measure_index(args: argparse.Namespace) -> None:
    await _measure_memory(args.blocks)
    await _measure_calls(args.calls)


@asynccontextmanager
async def _valkey() -> AsyncIterator[Redis]:
    async with supervised(Settings()) as (settings, _):
        assert settings.mesh.redis_url is not None
        client = Redis.from_url(settings.mesh.redis_url)
        yield client
        await client.aclose()


# -- memory ----------------------------------------------------------------------------------------


async def _measure_memory(n_blocks: int) -> None:
    layouts: dict[str, Layout] = {
        "a string a block": _strings,
        "16,384 hashes, 16 bytes": _whole_hashes,
        "ours: 16,384 hashes, 8 bytes": _ours,
        "ours, every block on four engines": _ours_on_four,
    }
    print(f"bytes of Redis's memory for each of {n_blocks} cached blocks, and of 20,000")
    for name, write in layouts.items():
        few, many = [await _bytes_per_block(write, n) for n in (20_000, n_blocks)]
        print(f"  {name:36}{many:8.1f}{few:8.1f}", flush=True)


async def _bytes_per_block(write: Layout, n_blocks: int) -> float:
    async with _valkey() as client:
        before = (await client.info("memory"))["used_memory"]
        await write(client, n_blocks)
        return ((await client.info("memory"))["used_memory"] - before) / n_blocks


async def _strings(client: Redis, n_blocks: int) -> None:
    await _write(client, n_blocks, "redis.call('SET', prefix .. hash, '12')")


async def _whole_hashes(client: Redis, n_blocks: int) -> None:
    field = "string.char(hash:byte(1), hash:byte(2) % 64), string.sub(hash, 3)"
    await _write(client, n_blocks, f"redis.call('HSET', prefix .. {field}, '12')")


async def _write(client: Redis, n_blocks: int, command: str) -> None:
    """`command` is Lua for one block."""
    script = client.register_script(f"""
        local prefix = 'pagemesh:prefix:'
        for i = 1, #ARGV[1], 16 do
          local hash = string.sub(ARGV[1], i, i + 15)
          {command}
        end""")
    for part in _parts(n_blocks):
        await script(args=[part])


async def _ours(client: Redis, n_blocks: int) -> None:
    index = PrefixIndex(client, "pagemesh")
    claim = await index.claim("engine")
    for part in _parts(n_blocks):
        await index.publish(claim, index_keys(part, CARD), b"")


async def _ours_on_four(client: Redis, n_blocks: int) -> None:
    index = PrefixIndex(client, "pagemesh")
    claims = [await index.claim(f"engine {number}") for number in range(4)]
    for part in _parts(n_blocks):
        for claim in claims:
            await index.publish(claim, index_keys(part, CARD), b"")


def _parts(n_blocks: int) -> Iterator[bytes]:
    """Packed hashes of up to 1024 blocks each."""
    for start in range(0, n_blocks, 1024):
        yield os.urandom(16 * min(1024, n_blocks - start))


# -- calls -----------------------------------------------------------------------------------------


async def _measure_calls(calls: int) -> None:
    async with _valkey() as client:
        index = PrefixIndex(client, "pagemesh")
        claims = [await index.claim(f"engine {number}") for number in range(max(ENGINES))]
        for part in _parts(200_000):
            await index.publish(claims[0], index_keys(part, CARD), b"")
        print("CPU microseconds of a call: in Python, in Redis")
        await _measure_publishing(client, index, claims[0], calls)
        await _measure_walk(client, index, claims[0])
        await _measure_lookups(client, index, claims, calls)


async def _measure_publishing(client: Redis, index: PrefixIndex, claim: Claim, calls: int) -> None:
    for n_blocks in CALL_BLOCKS:
        contents = [os.urandom(16 * n_blocks) for _ in range(calls)]

        async def publish(number: int, contents: list[bytes] = contents) -> None:
            await index.publish(claim, index_keys(contents[number], CARD), b"")

        python_us, redis_us = await _timed(client, publish, calls)
        print(
            f"  publish {n_blocks:5} blocks: {python_us:8.0f} {redis_us:8.0f}"
            f"   a block: {python_us / n_blocks:6.2f} {redis_us / n_blocks:6.2f}",
            flush=True,
        )
        for content in contents:
            await index.publish(claim, b"", index_keys(content, CARD))


async def _measure_walk(client: Redis, index: PrefixIndex, claim: Claim) -> None:
    async def rewrite(number: int) -> None:
        await index.rewrite(claim, number, 0, b"")

    python_us, redis_us = await _timed(client, rewrite, N_FIRST)
    print(f"  walk a 256th of 200,000 blocks: {python_us:6.0f} {redis_us:6.0f}", flush=True)


async def _measure_lookups(
    client: Redis, index: PrefixIndex, claims: list[Claim], calls: int
) -> None:
    """Every engine holds a different part of the chain."""
    for n_blocks in CHAIN_BLOCKS:
        for n_engines in ENGINES:
            hashes = os.urandom(16 * n_blocks)
            keys = index_keys(hashes, CARD)
            for number, claim in enumerate(claims[:n_engines], 1):
                depth = n_blocks * number // n_engines
                for start in range(0, depth, 1024):
                    part = keys[start * KEY_BYTES : min(depth, start + 1024) * KEY_BYTES]
                    await index.publish(claim, part, b"")

            async def look_up(_: int, hashes: bytes = hashes) -> None:
                await index.depths(index_keys(hashes, CARD))

            python_us, redis_us = await _timed(client, look_up, calls)
            print(
                f"  look up {n_blocks:5} blocks, {n_engines:2} engines: "
                f"{python_us:6.0f} {redis_us:6.0f}",
                flush=True,
            )


async def _timed(
    client: Redis, call: Callable[[int], Awaitable[None]], calls: int
) -> tuple[float, float]:
    """CPU microseconds of one of `calls` calls, here and in Redis, sockets included: on a machine
    that is busy otherwise, times say little."""
    redis_s, own_s = await _cpu_s(client), time.process_time()
    for number in range(calls):
        await call(number)
    own_s = time.process_time() - own_s
    redis_s = await _cpu_s(client) - redis_s
    return own_s / calls * 1e6, redis_s / calls * 1e6


async def _cpu_s(client: Redis) -> float:
    used = await client.info("cpu")
    return used["used_cpu_user_main_thread"] + used["used_cpu_sys_main_thread"]

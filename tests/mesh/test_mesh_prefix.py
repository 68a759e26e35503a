"""A mesh with two workers and two tokenizer services: who holds a prefix gets the request."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
import redis
from mesh_parts import RECOVERY_S, parts_of
from mesh_process import SMALL_MESH, MeshProcess, running_mesh, wait_until

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]
FLAGS: Final = (*SMALL_MESH, "--workers", "2", "--tokenizers", "2", "--request-timeout-s", "100")
# They begin alike, so by affinity alone they would all belong on one engine.
BEGINNING: Final = "The page table of this machine has one entry for every page of memory. " * 2
TAILS: Final = [
    f"Its owner, number {n}, " + f"says {n} times {n + 7} again. " * 20 for n in range(6)
]
# All but the last blocks, whose tokens the next prompt may not have.
MOST: Final = 0.8
LOOKUPS: Final = "pagemesh_index_lookups_total"


@pytest.fixture(scope="module")
def mesh(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """Of this module alone, to be hurt. Every prompt was asked for once, all at a time, so that
    both workers have some."""
    assert smollm2_folder.is_dir()
    with running_mesh(tmp_path_factory.mktemp("prefix"), *FLAGS) as running:
        wait_until(lambda: engines_known(running) == [2, 2], RECOVERY_S)
        asyncio.run(ask_all_at_once(running))
        steps = [each.total("pagemesh_worker_steps_total") for each in parts_of(running, "worker")]
        assert min(steps) > 0
        wait_until(lambda: index_keys(running) != [], RECOVERY_S)
        yield running


def engines_known(mesh: MeshProcess) -> list[int]:
    scrapes = [each.scrape() for each in parts_of(mesh, "tokenizer")]
    return [
        sum(name == "vllm:num_requests_running" for name, _, _ in scrape.samples)
        for scrape in scrapes
    ]


async def ask(mesh: MeshProcess, session: aiohttp.ClientSession, tail: str) -> dict[str, Any]:
    body = {"prompt": BEGINNING + tail, "max_tokens": 2, "temperature": 0}
    async with session.post(f"{mesh.base_url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        usage: dict[str, Any] = (await answer.json())["usage"]
        return usage


async def ask_all_at_once(mesh: MeshProcess) -> None:
    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(ask(mesh, session, tail) for tail in TAILS))


async def cached_shares(mesh: MeshProcess) -> list[float]:
    """Of each prompt, asked for one after the other: the two tokenizer services take turns."""
    shares = []
    async with aiohttp.ClientSession() as session:
        for tail in TAILS:
            usage = await ask(mesh, session, tail)
            cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
            shares.append(cached_tokens / usage["prompt_tokens"])
    return shares


def index_keys(mesh: MeshProcess) -> list[bytes]:
    """The shards that hold something."""
    with valkey(mesh) as client:
        return sorted(client.keys("pagemesh:prefix:??"))


def valkey(mesh: MeshProcess) -> redis.Redis:
    return redis.Redis.from_url(mesh.all_of("scheduler")[0].environ()["PAGEMESH_REDIS_URL"])


def total(mesh: MeshProcess, name: str, **labels: str) -> float:
    return sum(each.total(name, **labels) for each in parts_of(mesh, "tokenizer"))


async def check_all_are_found(mesh: MeshProcess) -> None:
    """But for those that the index did not answer in time: they go elsewhere, and a busy machine
    may take that long."""
    names = ("hit", "unanswered")
    before = [total(mesh, LOOKUPS, result=name) for name in names]
    shares = await cached_shares(mesh)
    hits, unanswered = (
        total(mesh, LOOKUPS, result=name) - earlier
        for name, earlier in zip(names, before, strict=True)
    )
    assert hits + unanswered == len(TAILS)
    assert hits >= len(TAILS) // 2
    assert sum(share <= MOST for share in shares) <= unanswered, shares


async def test_a_prefix_goes_where_it_is_cached_whoever_places_it(mesh: MeshProcess) -> None:
    await check_all_are_found(mesh)


async def test_an_index_that_was_flushed_fills_again(mesh: MeshProcess) -> None:
    before = index_keys(mesh)
    with valkey(mesh) as client:
        client.flushall()
    wait_until(lambda: index_keys(mesh) == before, RECOVERY_S)
    await check_all_are_found(mesh)


async def test_requests_go_on_while_redis_is_silent(mesh: MeshProcess) -> None:
    before = total(mesh, LOOKUPS, result="unanswered")
    process = mesh.child("valkey")
    process.send_signal(signal.SIGSTOP)
    try:
        shares = await cached_shares(mesh)
    finally:
        process.send_signal(signal.SIGCONT)
    assert len(shares) == len(TAILS)
    assert total(mesh, LOOKUPS, result="unanswered") == before + len(TAILS)
    assert '"prefix_index_silent"' in mesh.log.read_text()


async def test_no_request_fails_when_redis_is_killed_and_the_new_one_learns_all(
    mesh: MeshProcess,
) -> None:
    before = index_keys(mesh)
    mesh.child("valkey").kill()
    await ask_all_at_once(mesh)
    wait_until(lambda: mesh.has_child("valkey"), RECOVERY_S)
    await ask_all_at_once(mesh)
    wait_until(lambda: set(index_keys(mesh)) >= set(before), RECOVERY_S)
    await check_all_are_found(mesh)

"""Thousands of malformed and boundary requests beside a healthy stream on the real mesh: no 5xx, no
service restarts, and the stream's text is what it is alone. `make fuzz` throws more of them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import pytest
from hostile_requests import Hostile, hostile, targets_of
from mesh_parts import listen_to, told_alone
from mesh_process import SERVICES, MeshProcess

pytestmark = pytest.mark.mesh
AT_ONCE: Final = 16
# Whoever waits longer has asked for a long answer, and hangs up.
PATIENCE_S: Final = {"reads": 5.0, "lingers": 0.05, "leaves": 0.05}


async def test_hostile_requests_hurt_nobody(mesh: MeshProcess, pytestconfig: pytest.Config) -> None:
    n_requests = pytestconfig.getoption("fuzz_requests")
    seed = pytestconfig.getoption("fuzz_seed")
    before, alone = pids_of(mesh), told_alone(mesh.base_url)
    logged_bytes = mesh.log.stat().st_size
    outcomes: Counter[str] = Counter()
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{mesh.base_url}/openapi.json") as response:
            targets = targets_of(await response.json())
        drawn = ((f"{seed}-{i}", hostile(f"{seed}-{i}", targets)) for i in range(n_requests))
        throwing = asyncio.gather(
            *(throw_all(mesh.base_url, drawn, outcomes) for _ in range(AT_ONCE))
        )
        told = [await listen_to(mesh.base_url, session)]
        while not throwing.done():
            told.append(await listen_to(mesh.base_url, session))
        await throwing
    assert set(told) == {alone}
    assert pids_of(mesh) == before
    lines = mesh.log.read_bytes()[logged_bytes:].splitlines()
    assert [line for line in lines if json.loads(line)["level"] in ("error", "critical")] == []
    assert outcomes["200"]
    assert outcomes["reads"] < n_requests / 100, outcomes


def pids_of(mesh: MeshProcess) -> list[int]:
    """Of the services. The process that tries rules may end, and is started again."""
    return [mesh.child(name).pid for name in (*SERVICES, "valkey")]


async def throw_all(url: str, drawn: Iterator[tuple[str, Hostile]], outcomes: Counter[str]) -> None:
    for name, request in drawn:
        answer = await thrown(url, request)
        status = status_of(answer)
        where = f"{name}: {request.about}: {request.data[:300]!r} -> {answer[:600]!r}"
        in_time = status != 504 or b'"timeout":' not in request.data
        assert status is None or 200 <= status < 500 or not in_time, where
        outcomes[str(status or request.end)] += 1


async def thrown(url: str, request: Hostile) -> bytes:
    """What is answered, if anything is."""
    split = urlsplit(url)
    reader, writer = await asyncio.open_connection(split.hostname, split.port)
    try:
        async with asyncio.timeout(PATIENCE_S[request.end]):
            writer.write(request.data)
            await writer.drain()
            return b"" if request.end == "leaves" else await reader.read()
    except (TimeoutError, ConnectionError):
        return b""
    finally:
        writer.transport.abort()


def status_of(answer: bytes) -> int | None:
    final = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    return int(final.split(b" ", 2)[1]) if final.startswith(b"HTTP/") else None

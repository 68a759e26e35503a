"""Gateways alone under load, and what stands in for them with nothing around it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any, Final, NamedTuple

import aiohttp
import msgspec
import psutil

from parts.bare_server import WIRE_BYTES
from parts.drive import PATH, Drive, Driven, Driver, Tool
from parts.lone_gateway import Gateways, running_gateways
from parts.scrape import buckets, quantile, total
from parts.scripted_tokenizer import MODEL, TOKEN_TEXT
from parts.services import python_path

LAG: Final = "pagemesh_event_loop_lag_seconds"
TOKENS: Final = "vllm:generation_tokens_total"
RECEIVED: Final = "pagemesh_requests_received_total"
# A real engine's tokens come in steps, too; short answers gather for as long.
REQUEST_STEP_S: Final = 0.001
_WARM_UP_S: Final = 0.5
_WARM_TIMEOUT_S: Final = 30.0
_PROMPT: Final = "Once upon a time there was a mesh of"
_FOR_EVER_TOKENS: Final = 2**19
_US: Final = 1e6


class Demand(NamedTuple):
    """Of each row: `seconds` after warming up. Connections and streams are for each gateway."""

    seconds: int
    connections: int
    streams: int
    tool: Tool
    log_level: str


class Row(msgspec.Struct, kw_only=True):
    """`unit` is what was counted: requests, tokens or writes. CPU time is of all `processes` (the
    gateways, or what stands for them); `busiest` is the largest share of a core. `lag_p99_s` is of
    the gateways' event loops, request times are as the load tool saw them."""

    name: str
    unit: str
    processes: int
    asked_per_s: int | None = None
    per_s: float
    per_cpu_s: float
    user_us: float
    system_us: float
    busiest: float
    events_per_token: float | None = None
    lag_p99_s: float | None = None
    p50_s: float | None = None
    p99_s: float | None = None


class Reading(NamedTuple):
    """At one moment; CPU seconds are (user, system) of each process."""

    at_s: float
    cpu_s: list[tuple[float, float]]
    metrics: list[str] = []


def _row(name: str, unit: str, before: Reading, after: Reading, n: float, **more: Any) -> Row:
    pairs = list(zip(before.cpu_s, after.cpu_s, strict=True))
    user_s = sum(end[0] - start[0] for start, end in pairs)
    system_s = sum(end[1] - start[1] for start, end in pairs)
    seconds = after.at_s - before.at_s
    return Row(
        name=name,
        unit=unit,
        processes=len(pairs),
        per_s=n / seconds,
        per_cpu_s=n / (user_s + system_s),
        user_us=user_s / n * _US,
        system_us=system_s / n * _US,
        busiest=max(sum(end) - sum(start) for start, end in pairs) / seconds,
        **more,
    )


# -- gateways -------------------------------------------------------------------------------------


async def requests_row(demand: Demand, n: int) -> Row:
    """Answers of one token, asked for as fast as they come."""
    body = _body(max_tokens=1)
    async with running_gateways(n, REQUEST_STEP_S, _cores(n), demand.log_level) as gateways:
        load = _load(demand, gateways.url, n, demand.connections * n, body)
        before, after, driven = await _observed(demand, gateways, load)
    return _row(
        "short answers",
        "requests",
        before,
        after,
        _gained(before, after, RECEIVED),
        lag_p99_s=_lag_p99_s(before, after),
        p50_s=driven.p50_s,
        p99_s=driven.p99_s,
    )


async def streams_row(demand: Demand, n: int, rate: int) -> Row:
    """Streams without an end, `rate` tokens a second for each gateway; 0: as fast as they go."""
    body = _body(max_tokens=_FOR_EVER_TOKENS, stream=True)
    step_s = demand.streams / rate if rate else 0.0
    async with running_gateways(n, step_s, _cores(n), demand.log_level) as gateways:
        head_bytes, event_bytes = await _sizes(gateways.url)
        load = _load(demand, gateways.url, n, demand.streams * n, body)
        start = await _read(gateways)
        before, after, driven = await _observed(demand, gateways, load)
        n_tokens = _gained(start, await _read(gateways), TOKENS)
    text_bytes = driven.bytes - head_bytes * demand.streams * n - n_tokens * len(TOKEN_TEXT)
    return _row(
        "streams",
        "tokens",
        before,
        after,
        _gained(before, after, TOKENS),
        asked_per_s=rate * n,
        events_per_token=text_bytes / (event_bytes - len(TOKEN_TEXT)) / n_tokens,
        lag_p99_s=_lag_p99_s(before, after),
    )


def _body(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": MODEL, "prompt": _PROMPT, **fields})


def _cores(n: int) -> list[int]:
    """One for each of `n`, if that leaves one for all others."""
    return list(range(n)) if n < (os.cpu_count() or 1) else []


def _load(demand: Demand, url: str, n: int, connections: int, body: bytes) -> Drive:
    n_cores = os.cpu_count() or 1
    others = list(range(n, n_cores)) if n < n_cores else None
    return Drive(
        url=url,
        body=body,
        connections=connections,
        threads=n,
        cores=others,
    )


async def _observed(
    demand: Demand, gateways: Gateways, load: Drive
) -> tuple[Reading, Reading, Driven]:
    """Readings before and after `seconds` in the middle of the load, and what it counted."""
    driver = Driver(load, demand.tool)
    await driver.start()
    await _until_warm(gateways, load)
    before = await _read(gateways)
    await asyncio.sleep(demand.seconds)
    after = await _read(gateways)
    return before, after, await driver.stop()


async def _until_warm(gateways: Gateways, load: Drive) -> None:
    """Every connection has asked, and answers have come for a while. Raises TimeoutError."""
    async with asyncio.timeout(_WARM_TIMEOUT_S):
        while _sum(await _read(gateways), RECEIVED) < load.connections:  # noqa: ASYNC110
            await asyncio.sleep(_WARM_UP_S)
        await asyncio.sleep(_WARM_UP_S)


async def _read(gateways: Gateways) -> Reading:
    async with aiohttp.ClientSession() as session:
        metrics = await gateways.scrape(session)
        return Reading(time.monotonic(), gateways.cpu_s(), metrics)


def _gained(before: Reading, after: Reading, name: str) -> float:
    return _sum(after, name) - _sum(before, name)


def _sum(reading: Reading, name: str) -> float:
    return sum(total(text, name) for text in reading.metrics)


def _lag_p99_s(before: Reading, after: Reading) -> float:
    return quantile(buckets(before.metrics, LAG), buckets(after.metrics, LAG), 0.99)


async def _sizes(url: str) -> tuple[int, int]:
    """Bytes on the wire of a stream's head, and of an event of one token."""
    host, _, port = url.removeprefix("http://").partition(":")
    body = _body(max_tokens=3, stream=True)
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = await reader.readuntil(b"\r\n\r\n")
    events = await reader.readuntil(b"[DONE]\n\n")
    writer.close()
    event = next(part for part in events.split(b"\r\n") if TOKEN_TEXT.encode() in part)
    return len(answer), len(event) + len(f"{len(event):x}") + 4


# -- nothing around -------------------------------------------------------------------------------


async def floors(demand: Demand) -> AsyncIterator[Row]:
    """What one core carries of the system calls, and of the HTTP library, alone."""
    load = _load(demand, "", 1, demand.streams, b"{}")
    before, after, driven = await _bare("writes", demand, load)
    n_writes = driven.bytes / WIRE_BYTES
    yield _row("one write an event", "writes", before, after, n_writes)
    load = _load(demand, "", 1, demand.connections, _body(max_tokens=1))
    before, after, driven = await _bare("requests", demand, load)
    times = {"p50_s": driven.p50_s, "p99_s": driven.p99_s}
    yield _row("aiohttp alone", "requests", before, after, driven.requests, **times)


async def _bare(kind: str, demand: Demand, load: Drive) -> tuple[Reading, Reading, Driven]:
    """Readings around the whole load."""
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "parts.bare_server", kind),
        env={**os.environ, "PYTHONPATH": python_path()},
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    try:
        url = f"http://127.0.0.1:{int(await server.stdout.readline())}"
        process = psutil.Process(server.pid)
        if cores := _cores(1):
            process.cpu_affinity(cores)
        driver = Driver(msgspec.structs.replace(load, url=url), demand.tool)
        before = _reading(process)
        await driver.start()
        await asyncio.sleep(demand.seconds)
        driven = await driver.stop()
        return before, _reading(process), driven
    finally:
        server.kill()
        await server.wait()


def _reading(process: psutil.Process) -> Reading:
    times = process.cpu_times()
    return Reading(time.monotonic(), [(times.user, times.system)])


# -- lines ----------------------------------------------------------------------------------------

_COLUMNS: Final = (
    *("gateways", "asked/s", "per s", "per CPU s", "user µs", "system µs", "busiest"),
    *("events/token", "lag p99 ms", "p50 ms", "p99 ms"),
)


def head_line() -> str:
    return f"{'':30}" + "".join(f"{name:>13}" for name in _COLUMNS)


def row_line(row: Row) -> str:
    figures = (
        str(row.processes),
        "" if row.asked_per_s is None else str(row.asked_per_s),
        f"{row.per_s:.0f}",
        f"{row.per_cpu_s:.0f}",
        f"{row.user_us:.1f}",
        f"{row.system_us:.1f}",
        f"{row.busiest:.0%}",
        "" if row.events_per_token is None else f"{row.events_per_token:.3f}",
        *map(_in_ms, (row.lag_p99_s, row.p50_s, row.p99_s)),
    )
    return f"{row.name + ', ' + row.unit:30}" + "".join(f"{figure:>13}" for figure in figures)


def _in_ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f}"

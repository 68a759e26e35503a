"""`pagemesh bench startup`: how long a mesh takes to its first answer, and what it holds."""

from __future__ import annotations

import asyncio
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import aiohttp
import msgspec
from msgspec.structs import replace

from pagemesh.banner import gateway_url
from pagemesh.bench.memory import MemoryPeaks, sample_tree
from pagemesh.own_mesh import own_mesh
from pagemesh.shared.errors import StartupError
from pagemesh.shared.settings import LogSettings, Settings

READY_TIMEOUT_S: Final = 600.0
_POLL_S: Final = 0.01
_SAMPLE_S: Final = 0.2
_TAIL_LINES: Final = 10
_LOG_FIELDS: Final = ("event", "level", "logger", "service", "timestamp")
# What the worker tells of its start is read from its log.
_LOG: Final = LogSettings(log_level="info", log_format="json")


@dataclass(slots=True)
class StartupRun:
    """Seconds from the start of the command until the gateway listened, was ready (an engine is
    up), and had answered a request for one token; and those of each stage of the worker's start,
    which is a part of the time until ready. `division` is what the worker says of its memory."""

    listening_s: float = 0.0
    ready_s: float = 0.0
    first_answer_s: float = 0.0
    memory: MemoryPeaks = field(default_factory=MemoryPeaks)
    worker_stages_s: dict[str, float] = field(default_factory=dict)
    division: dict[str, Any] = field(default_factory=dict)


async def measure_startup(settings: Settings) -> StartupRun:
    """Serve once, as `pagemesh serve` does. Raises StartupError when the mesh does not start."""
    with TemporaryDirectory(prefix="pagemesh-bench-") as folder:
        log = Path(folder) / "serve.log"
        started_s = time.monotonic()
        with log.open("wb") as stderr:
            async with own_mesh(replace(settings, log=_LOG), stderr) as process:
                return await _measured(process, settings, log, started_s)


async def _measured(
    process: Process, settings: Settings, log: Path, started_s: float
) -> StartupRun:
    run = StartupRun()

    def elapsed_s() -> float:
        return time.monotonic() - started_s

    async with _sampled_memory(process.pid, run.memory), _Client(settings) as client:
        async with asyncio.timeout(READY_TIMEOUT_S):
            await _until(lambda: client.answers("/health"), process, log)
            run.listening_s = elapsed_s()
            await _until(lambda: client.answers("/ready"), process, log)
            run.ready_s = elapsed_s()
            await client.ask_for_one_token()
            run.first_answer_s = elapsed_s()
    _add_worker(run, log)
    return run


def _add_worker(run: StartupRun, log: Path) -> None:
    events = worker_events(log.read_text(errors="replace"))
    run.worker_stages_s = events.get("started", {}).get("seconds", {})
    run.division = events.get("memory_divided", {})


def worker_events(log_text: str) -> dict[str, dict[str, Any]]:
    """The figures of each event that the worker logged, by its name; the last of each."""
    events: dict[str, dict[str, Any]] = {}
    for line in log_text.splitlines():
        with suppress(msgspec.DecodeError):
            entry = msgspec.json.decode(line)
            if isinstance(entry, dict) and entry.get("service") == "worker":
                figures = {name: entry[name] for name in entry if name not in _LOG_FIELDS}
                events[str(entry.get("event"))] = figures
    return events


class _Client:
    """Asks the gateway. A context manager."""

    def __init__(self, settings: Settings) -> None:
        keys = settings.gateway.api_key
        self._session = aiohttp.ClientSession(
            gateway_url(settings.gateway),
            headers={"Authorization": f"Bearer {keys[0]}"} if keys else {},
            # Our own process, maybe under a self-signed certificate: nothing to verify.
            connector=aiohttp.TCPConnector(ssl=False),
        )

    async def __aenter__(self) -> _Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def answers(self, path: str) -> bool:
        try:
            async with self._session.get(path) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    async def ask_for_one_token(self) -> None:
        async with self._session.get("/v1/models") as answer:
            model = (await answer.json())["data"][0]["id"]
        body = {"model": model, "prompt": "Hello", "max_tokens": 1}
        async with self._session.post("/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise StartupError(f"the first request failed: {await answer.text()}")


async def _until(done: Callable[[], Awaitable[bool]], process: Process, log: Path) -> None:
    """Ask again and again. Raises StartupError with its last lines when the mesh has ended."""
    while not await done():
        if process.returncode is not None:
            raise StartupError(f"pagemesh serve ended before it was ready:\n{_last_lines(log)}")
        await asyncio.sleep(_POLL_S)


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])


@asynccontextmanager
async def _sampled_memory(pid: int, peaks: MemoryPeaks) -> AsyncIterator[None]:
    """Peaks while the block runs, and once more at its end."""
    sampling = asyncio.create_task(_sample_memory(pid, peaks))
    try:
        yield
        peaks.add(await asyncio.to_thread(sample_tree, pid))
    finally:
        sampling.cancel()


async def _sample_memory(pid: int, peaks: MemoryPeaks) -> None:
    while True:
        peaks.add(await asyncio.to_thread(sample_tree, pid))
        await asyncio.sleep(_SAMPLE_S)

"""One client process: sends its share of the requests and notes what comes back, and when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import aiohttp

from pagemesh.bench.records import Failure, Record
from pagemesh.bench.sse import StreamFailed, StreamLog

LAG_PERIOD_S: Final = 0.05
_SHOWN_CHARS: Final = 300

Now = Callable[[], float]
OnDone = Callable[[Record], None]


class Target(NamedTuple):
    """Where requests go. `timeout_s` bounds one request."""

    url: str
    headers: dict[str, str]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Job:
    """One request, encoded. `arrival_s` counts from the start of the run."""

    index: int
    arrival_s: float
    body: bytes
    asked_tokens: int
    prompt_tokens: int | None


class Share(NamedTuple):
    """What one client process has to do."""

    target: Target
    jobs: list[Job]
    max_concurrency: int | None


@dataclass(slots=True)
class ClientLoad:
    """How busy one client was. `cpu_share` is the share of one core that its thread used; `lag_s`
    are samples of how late its event loop ran."""

    cpu_share: float = 0.0
    lag_s: list[float] = field(default_factory=list)


class ShareResult(NamedTuple):
    records: list[Record]
    load: ClientLoad


async def run_share(share: Share, start_s: float, on_done: OnDone) -> ShareResult:
    """Send every job at `start_s + arrival_s` (monotonic clock), or as soon as the concurrency
    allows it."""
    records: list[Record] = []

    def done(record: Record) -> None:
        records.append(record)
        on_done(record)

    async with open_session(share.target) as session:
        await _sleep_until(start_s)
        with _measured_load() as load:
            await _send_all(session, share, start_s, done)
    return ShareResult(records, load)


@asynccontextmanager
async def open_session(target: Target) -> AsyncIterator[aiohttp.ClientSession]:
    """A session without limits of its own, so that only `max_concurrency` counts."""
    async with aiohttp.ClientSession(
        headers=target.headers,
        timeout=aiohttp.ClientTimeout(total=target.timeout_s),
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=None),
    ) as session:
        yield session


async def stream_one(
    session: aiohttp.ClientSession, url: str, job: Job, now_s: Now = time.monotonic
) -> Record:
    """Send one request and read its stream to the end. Failures are in the record."""
    stream = StreamLog()
    sent_s = now_s()
    failure: Failure | None = None
    try:
        async with session.post(url, data=job.body) as answer:
            await _check_status(answer)
            async for data in answer.content.iter_any():
                stream.feed(data, now_s())
        stream.close(now_s())
    except StreamFailed as error:
        failure = error.failure
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        failure = _connection_failure(error)
    return _record(job, sent_s, stream, now_s(), failure)


async def _send_all(
    session: aiohttp.ClientSession, share: Share, start_s: float, done: OnDone
) -> None:
    limit = share.max_concurrency
    gate = asyncio.Semaphore(limit) if limit is not None else None

    async def one(job: Job) -> None:
        try:
            done(await stream_one(session, share.target.url, job))
        finally:
            if gate is not None:
                gate.release()

    async with asyncio.TaskGroup() as group:
        for job in share.jobs:
            await _sleep_until(start_s + job.arrival_s)
            if gate is not None:
                await gate.acquire()
            group.create_task(one(job))


async def _sleep_until(at_s: float) -> None:
    await asyncio.sleep(max(at_s - time.monotonic(), 0.0))


@contextmanager
def _measured_load() -> Iterator[ClientLoad]:
    load = ClientLoad()
    wall_s, cpu_s = time.monotonic(), time.thread_time()
    sampling = asyncio.create_task(_sample_lag(load.lag_s))
    try:
        yield load
    finally:
        sampling.cancel()
        elapsed_s = time.monotonic() - wall_s
        load.cpu_share = (time.thread_time() - cpu_s) / max(elapsed_s, 1e-9)


async def _sample_lag(lag_s: list[float]) -> None:
    while True:
        due_s = time.monotonic() + LAG_PERIOD_S
        await asyncio.sleep(LAG_PERIOD_S)
        lag_s.append(max(time.monotonic() - due_s, 0.0))


async def _check_status(answer: aiohttp.ClientResponse) -> None:
    if answer.status != 200:
        text = await answer.text(errors="replace")
        raise StreamFailed(f"HTTP {answer.status}", text[:_SHOWN_CHARS])


def _connection_failure(error: Exception) -> Failure:
    shown = str(error) or type(error).__name__
    if isinstance(error, TimeoutError):
        return Failure("timeout", shown)
    if isinstance(error, aiohttp.ClientPayloadError):
        return Failure("cut stream", shown)
    return Failure("connection", shown)


def _record(
    job: Job, sent_s: float, stream: StreamLog, now_s: float, failure: Failure | None
) -> Record:
    complete = failure is None and stream.last_s is not None
    return Record(
        index=job.index,
        sent_s=sent_s,
        end_s=stream.last_s if complete and stream.last_s is not None else now_s,
        event_s=stream.event_s,
        prompt_tokens=job.prompt_tokens if stream.prompt_tokens is None else stream.prompt_tokens,
        output_tokens=stream.output_tokens,
        counted_from=stream.counted_from,
        asked_tokens=job.asked_tokens,
        failure=failure,
    )

"""One client process: sends its share of the requests and notes what comes back, and when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Final, NamedTuple

import aiohttp

from pagemesh.bench.client_load import ClientLoad, measured_load
from pagemesh.bench.records import Failure, Record
from pagemesh.bench.sse import StreamFailed, StreamLog
from pagemesh.shared.errors import PagemeshError

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
    """What one client process has to do. One that `gives_up` stops once it is the limit."""

    target: Target
    jobs: list[Job]
    max_concurrency: int | None
    gives_up: bool = False


class ClientSaturated(PagemeshError):
    """The client, not the server, has become the limit of the run."""


class ShareResult(NamedTuple):
    records: list[Record]
    load: ClientLoad


async def run_share(share: Share, start_s: float, on_done: OnDone) -> ShareResult:
    """Send every job at `start_s + arrival_s` (monotonic clock), or as soon as the concurrency
    allows it. Raises ClientSaturated when it gives up."""
    records: list[Record] = []

    def done(record: Record) -> None:
        records.append(record)
        on_done(record)

    async with open_session(share.target) as session:
        await _sleep_until(start_s)
        sending = asyncio.create_task(_send_all(session, share, start_s, done))
        async with measured_load(sending.cancel if share.gives_up else _go_on) as load:
            await asyncio.wait([sending])
    if sending.cancelled():
        raise ClientSaturated("a client process was the limit")
    sending.result()
    return ShareResult(records, load)


@asynccontextmanager
async def open_session(target: Target) -> AsyncIterator[aiohttp.ClientSession]:
    """A session without limits of its own, so that only `max_concurrency` counts."""
    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(_on_kept_connection)
    async with aiohttp.ClientSession(
        headers=target.headers,
        timeout=aiohttp.ClientTimeout(total=target.timeout_s),
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=None),
        trace_configs=[trace],
    ) as session:
        yield session


async def stream_one(
    session: aiohttp.ClientSession, url: str, job: Job, now_s: Now = time.monotonic
) -> Record:
    """Send one request and read its stream to the end. Failures are in the record."""
    stream, post = StreamLog(), _Post(session, url, job.body)
    sent_s = now_s()
    failure: Failure | None = None
    try:
        async with await post.answer() as answer:
            await _check_status(answer)
            async for data in answer.content.iter_any():
                stream.feed(data, now_s())
        stream.close(now_s())
    except StreamFailed as error:
        failure = error.failure
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        failure = _connection_failure(error)
    record = _record(job, sent_s, stream, now_s(), failure)
    record.n_resends = post.n_resends
    return record


class _Post:
    """One request, sent again when the kept connection that it took was closed meanwhile.

    Some servers close a connection after each stream without saying so before (llama.cpp's does);
    the next request may take it before the news has come.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, body: bytes) -> None:
        self.n_resends = 0
        self.took_kept_connection = False
        self._session, self._url, self._body = session, url, body

    async def answer(self) -> aiohttp.ClientResponse:
        """Ends: each time one kept connection fewer is left, and a new one is not tried twice."""
        while True:
            self.took_kept_connection = False
            try:
                return await self._session.post(self._url, data=self._body, trace_request_ctx=self)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if not self.took_kept_connection:
                    raise
                self.n_resends += 1


async def _on_kept_connection(_: object, context: SimpleNamespace, __: object) -> None:
    if isinstance(context.trace_request_ctx, _Post):
        context.trace_request_ctx.took_kept_connection = True


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


def _go_on() -> None:
    """Keep measuring: the report will say that the client was the limit."""


async def _sleep_until(at_s: float) -> None:
    await asyncio.sleep(max(at_s - time.monotonic(), 0.0))


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

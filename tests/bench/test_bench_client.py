"""One request against a scripted server: exact times from a shared clock, failures by kind."""

from __future__ import annotations

import aiohttp
import pytest
from aiohttp import web
from scripted_server import (
    Play,
    Reply,
    ScriptedClock,
    ScriptedServer,
    chat,
    obedient,
    text,
    usage,
)

from pagemesh.bench.client import (
    ClientLoad,
    Job,
    Share,
    Target,
    open_session,
    run_share,
    stream_one,
)
from pagemesh.bench.records import Failure, Record

BODY = b'{"prompt": [1, 2, 3], "max_tokens": 4, "stream": true}'


def job(index: int = 0, body: bytes = BODY) -> Job:
    return Job(index, 0.0, body, asked_tokens=4, prompt_tokens=3)


def target(url: str, timeout_s: float = 30.0) -> Target:
    return Target(f"{url}/v1/completions", {"Content-Type": "application/json"}, timeout_s)


async def record_of(play: Play, now_s: ScriptedClock | None = None) -> Record:
    async with ScriptedServer(play).running() as server:
        where = target(server.url)
        async with open_session(where) as session:
            return await stream_one(session, where.url, job(), now_s or ScriptedClock())


def timed(clock: ScriptedClock, *moments: tuple[float, tuple[object, ...]]) -> Play:
    """Send each moment's events in one write, after the client has seen the moment before."""

    async def play(reply: Reply) -> web.StreamResponse:
        await clock.was_read()  # sent
        await reply.start()
        for at_s, events in moments:
            clock.now_s = at_s
            await reply.send(*events)
            await clock.was_read()
        return await reply.end()

    return play


async def test_times_are_those_of_the_events() -> None:
    clock = ScriptedClock()
    play = timed(
        clock,
        (0.5, (text("a"),)),
        (0.75, (text("b"), text("c"))),
        (1.5, (text("d", "length"),)),
        (9.0, (usage(3, 4), "[DONE]")),
    )
    record = await record_of(play, clock)
    assert record.failure is None
    assert record.ttft_s == 0.5
    assert list(record.itl_s) == [0.25, 0.0, 0.75]
    assert record.e2el_s == 1.5  # not when the connection closed
    assert record.tpot_s == pytest.approx(1.0 / 3)
    assert (record.prompt_tokens, record.output_tokens, record.counted_from) == (3, 4, "usage")


async def test_a_chat_counts_from_its_first_content_to_its_finish() -> None:
    clock = ScriptedClock()
    play = timed(
        clock,
        (0.25, (chat(role="assistant", content=""),)),
        (0.5, (chat(reasoning_content="hm"),)),
        (1.0, (chat(content="yes"),)),
        (2.0, (chat("stop"), "[DONE]")),
    )
    record = await record_of(play, clock)
    assert list(record.event_s) == [0.5, 1.0]
    assert record.e2el_s == 2.0
    assert (record.output_tokens, record.counted_from) == (2, "events")


async def test_a_single_token_without_text_is_the_first() -> None:
    clock = ScriptedClock()
    play = timed(clock, (0.5, (text("", "length"), usage(3, 1), "[DONE]")))
    record = await record_of(play, clock)
    assert (record.ttft_s, record.output_tokens, record.tpot_s) == (0.5, 1, None)


async def test_tokens_merged_in_one_event_still_count() -> None:
    clock = ScriptedClock()
    play = timed(clock, (1.0, (text("a"),)), (2.0, (text("bcd", "stop"), usage(3, 4), "[DONE]")))
    record = await record_of(play, clock)
    assert (len(record.event_s), record.output_tokens) == (2, 4)


async def overloaded(_: Reply) -> web.StreamResponse:
    raise web.HTTPServiceUnavailable(text="no engine")


async def error_event(reply: Reply) -> web.StreamResponse:
    await reply.start()
    await reply.send(text("a"), {"error": {"message": "worker lost", "code": 500}})
    return await reply.end()


async def cut(reply: Reply) -> web.StreamResponse:
    await reply.start()
    await reply.send(text("a"))
    return reply.cut()


async def unfinished(reply: Reply) -> web.StreamResponse:
    await reply.start()
    await reply.send(text("a"))
    return await reply.end()


async def empty(reply: Reply) -> web.StreamResponse:
    await reply.start()
    await reply.send(usage(3, 0), "[DONE]")
    return await reply.end()


async def garbage(reply: Reply) -> web.StreamResponse:
    await reply.start()
    await reply.send("{half")
    return await reply.end()


async def hang_up(reply: Reply) -> web.StreamResponse:
    return reply.cut()


@pytest.mark.parametrize(
    ("play", "kind", "message"),
    [
        (overloaded, "HTTP 503", "no engine"),
        (error_event, "error event", "worker lost"),
        (cut, "cut stream", ""),
        (unfinished, "cut stream", "before the answer did"),
        (empty, "no output", "no tokens"),
        (garbage, "bad event", "half"),
        (hang_up, "connection", ""),
    ],
)
async def test_failures_have_their_kind(play: Play, kind: str, message: str) -> None:
    failure = (await record_of(play)).failure
    assert failure is not None
    assert failure.kind == kind
    assert message in failure.message


async def test_nobody_listening_is_a_connection_failure() -> None:
    where = target("http://127.0.0.1:1")
    async with open_session(where) as session:
        record = await stream_one(session, where.url, job())
    assert record.failure is not None
    assert record.failure.kind == "connection"


async def test_a_silent_server_is_given_up() -> None:
    released = ScriptedClock()

    async def silent(reply: Reply) -> web.StreamResponse:
        await released.was_read()
        return await reply.end()

    async with ScriptedServer(silent).running() as server:
        where = target(server.url, timeout_s=0.05)
        async with open_session(where) as session:
            record = await stream_one(session, where.url, job())
        released()
    assert record.failure is not None
    assert record.failure.kind == "timeout"


async def test_a_kept_connection_that_the_server_has_closed_fails_no_request() -> None:
    """The first answer leaves a connection behind; the next request on it is dropped unread."""
    asked: list[object] = []

    async def drops_the_second(reply: Reply) -> web.StreamResponse:
        asked.append(reply.body)
        return reply.cut() if len(asked) == 2 else await obedient(reply)

    async with ScriptedServer(drops_the_second).running() as server:
        where = target(server.url)
        async with open_session(where) as session:
            records = [await stream_one(session, where.url, job()) for _ in range(2)]
    assert [record.failure for record in records] == [None, None]
    assert [record.n_resends for record in records] == [0, 1]
    assert asked == [asked[0]] * 3


async def test_a_share_keeps_to_its_concurrency_and_fills_it() -> None:
    """The first two answers come only when two requests are in flight, and never more are."""
    in_flight, peak = 0, 0
    pair = ScriptedClock()

    async def counted(reply: Reply) -> web.StreamResponse:
        nonlocal in_flight, peak
        in_flight += 1
        peak = max(peak, in_flight)
        if peak == 2:
            pair()
        await pair.was_read()
        pair()
        in_flight -= 1
        return await obedient(reply)

    async with ScriptedServer(counted).running() as server:
        jobs = [job(index) for index in range(9)]
        done: list[Record] = []
        result = await run_share(Share(target(server.url), jobs, 2), 0.0, done.append)
    assert peak == 2
    assert result.records == done
    assert sorted(record.index for record in done) == list(range(9))
    assert all(record.failure is None for record in done)


async def test_a_failed_request_takes_no_other_with_it() -> None:
    async def every_other(reply: Reply) -> web.StreamResponse:
        return await (obedient if reply.body["max_tokens"] == 4 else overloaded)(reply)

    bad = b'{"prompt": [1], "max_tokens": 5, "stream": true}'
    async with ScriptedServer(every_other).running() as server:
        jobs = [job(index, bad if index % 2 else BODY) for index in range(6)]
        share = Share(target(server.url), jobs, 1)
        result = await run_share(share, 0.0, lambda _: None)
    failures = {record.index: record.failure for record in result.records}
    assert [failures[i] for i in (0, 2, 4)] == [None] * 3
    assert all(failures[i] == Failure("HTTP 503", "no engine") for i in (1, 3, 5))


async def test_a_client_measures_its_own_load() -> None:
    async with ScriptedServer().running() as server:
        share = Share(target(server.url), [job()], None)
        load = (await run_share(share, 0.0, lambda _: None)).load
    assert isinstance(load, ClientLoad)
    assert load.cpu_share > 0


async def test_the_session_puts_no_limit_of_its_own() -> None:
    async with open_session(target("http://localhost")) as session:
        assert isinstance(session.connector, aiohttp.TCPConnector)
        assert session.connector.limit == 0

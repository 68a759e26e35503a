"""Links over real sockets: handshake, order, failure, bounded buffers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from socket import create_server
from typing import NamedTuple

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from pagemesh.shared import link as link_module
from pagemesh.shared import liveness
from pagemesh.shared.errors import HandshakeRefused, LinkClosed
from pagemesh.shared.link import LINK_PATH, Link, accept, dial
from pagemesh.shared.messages import Cancel, Deltas, Hello, Refused
from pagemesh.shared.wire import PROTOCOL, Message, encode

LISTENER = Hello(PROTOCOL, "worker", "worker-1", 7, "secret")
DIALLER = Hello(PROTOCOL, "scheduler", "scheduler-1", 9, "secret")


class Listening(NamedTuple):
    address: str
    session: aiohttp.ClientSession
    accepted: asyncio.Queue[Link]
    let_go: asyncio.Event


@asynccontextmanager
async def listening() -> AsyncIterator[Listening]:
    """A service that keeps each accepted link open until it is told to let go."""
    accepted: asyncio.Queue[Link] = asyncio.Queue()
    let_go = asyncio.Event()

    async def endpoint(request: web.Request) -> web.WebSocketResponse:
        link, socket = await accept(request, LISTENER)
        if link is not None:
            accepted.put_nowait(link)
            await let_go.wait()
            await link.close()
        return socket

    app = web.Application()
    app.router.add_get(LINK_PATH, endpoint)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        try:
            yield Listening(f"{server.host}:{server.port}", session, accepted, let_go)
        finally:
            let_go.set()


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[Link, Link]]:
    """Both ends of one link: the dialler's, the listener's."""
    async with listening() as there:
        ours = await dial(there.session, there.address, DIALLER)
        try:
            yield ours, await there.accepted.get()
        finally:
            there.let_go.set()
            await ours.close()


async def take(link: Link, count: int) -> list[Message]:
    taken: list[Message] = []
    async for message in link:
        taken.append(message)
        if len(taken) == count:
            break
    return taken


async def test_a_reader_with_frames_waiting_lets_the_loop_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a frame brought must leave before the flood ends."""
    monkeypatch.setattr(link_module, "MAX_BURST_S", -1.0)
    n_frames, turns = 200, 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with linked() as (ours, theirs):
        for i in range(n_frames):
            ours.send(Cancel(str(i)))
        await ours.drained()
        turning = asyncio.create_task(turn())
        seen: list[int] = []
        async for _ in theirs:
            seen.append(turns)
            if len(seen) == n_frames:
                break
        turning.cancel()
        assert len(set(seen)) == n_frames


async def test_frames_that_wait_together_cross_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """But a long one goes alone, and holds up no other."""
    async with linked() as (ours, theirs):
        sent: list[int] = []
        send_bytes = ours._socket.send_bytes

        async def counted(packet: bytes) -> None:
            sent.append(len(packet))
            await send_bytes(packet)

        monkeypatch.setattr(ours._socket, "send_bytes", counted)
        long = "x" * 100_000
        ids = [*map(str, range(20)), long, "last"]
        for request_id in ids:
            ours.send(Cancel(request_id))
        assert await take(theirs, len(ids)) == [Cancel(each) for each in ids]
        await ours.drained()
        assert len(sent) == 3
        assert sent[1] > len(long) > 100 > sent[2]


async def test_each_side_learns_who_the_other_is() -> None:
    async with linked() as (ours, theirs):
        assert ours.peer == LISTENER
        assert theirs.peer == DIALLER


async def test_messages_flow_both_ways_in_order() -> None:
    async with linked() as (ours, theirs):
        sent = [Cancel(f"request-{i}") for i in range(500)]
        for message in sent:
            ours.send(message)
            theirs.send(message)
        assert await take(theirs, 500) == sent
        assert await take(ours, 500) == sent
        await ours.drained()


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (DIALLER._replace(secret="another"), "mesh secret"),
        (DIALLER._replace(protocol=PROTOCOL + 1), f"protocol {PROTOCOL + 1}"),
    ],
)
async def test_the_handshake_refuses(hello: Hello, reason: str) -> None:
    async with listening() as there:
        with pytest.raises(HandshakeRefused, match=reason):
            await dial(there.session, there.address, hello)
        assert there.accepted.empty()


async def test_a_listener_that_does_not_know_the_secret_is_refused() -> None:
    """It may have let us in because it does not check."""

    async def endpoint(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive_bytes()
        await socket.send_bytes(encode(LISTENER._replace(secret="")))
        await socket.receive()
        return socket

    app = web.Application()
    app.router.add_get(LINK_PATH, endpoint)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        with pytest.raises(HandshakeRefused, match="mesh secret"):
            await dial(session, f"{server.host}:{server.port}", DIALLER)


async def test_a_first_frame_that_is_no_hello_is_refused() -> None:
    async with listening() as there:
        socket = await there.session.ws_connect(f"ws://{there.address}{LINK_PATH}")
        await socket.send_bytes(encode(Cancel("r")))
        assert await socket.receive_bytes() == encode(Refused("the first frame must be Hello"))
        await socket.close()


async def test_a_first_frame_that_is_no_frame_ends_the_socket() -> None:
    async with listening() as there:
        socket = await there.session.ws_connect(f"ws://{there.address}{LINK_PATH}")
        await socket.send_bytes(b"\xc1")
        assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
        await socket.close()


async def test_dialling_nobody_raises_a_client_error() -> None:
    async with listening() as there:
        with pytest.raises(aiohttp.ClientError):
            await dial(there.session, "127.0.0.1:1", DIALLER)


async def test_a_damaged_frame_closes_the_link_for_both() -> None:
    async with linked() as (ours, theirs):
        await theirs._socket.send_bytes(b"\xc1\xc1")  # no message encodes to this
        assert await take(ours, 1) == []
        assert ours.closed
        assert await take(theirs, 1) == []
        with pytest.raises(LinkClosed, match="scheduler-1"):
            theirs.send(Cancel("r"))


async def test_a_measured_link_tells_its_round_trips_and_its_readers_nothing() -> None:
    async with linked() as (ours, theirs):
        round_trips_s: asyncio.Queue[float] = asyncio.Queue()
        measuring = asyncio.create_task(ours.measure(0.001, round_trips_s.put_nowait))
        readers = [asyncio.create_task(take(link, 1)) for link in (ours, theirs)]
        assert [await round_trips_s.get() > 0 for _ in range(3)] == [True] * 3
        for link in (ours, theirs):
            link.send(Cancel("r"))
        assert await asyncio.gather(*readers) == [[Cancel("r")], [Cancel("r")]]
        await ours.close()
        await measuring


async def test_close_sends_what_was_queued() -> None:
    async with linked() as (ours, theirs):
        hearing = asyncio.create_task(take(theirs, 2))
        ours.send(Cancel("last words"))
        await ours.close()
        assert await hearing == [Cancel("last words")]
        assert theirs.closed


async def test_a_peer_that_does_not_read_closes_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MAX_BUFFERED_BYTES", 1000)
    async with linked() as (ours, _):
        # Nothing is written before the loop runs again, so the third message is too much.
        ours.send(Cancel("x" * 400))
        ours.send(Cancel("x" * 400))
        with pytest.raises(LinkClosed, match="buffer"):
            ours.send(Cancel("x" * 400))
        assert ours.closed
        await ours.drained()


async def test_a_dead_peer_ends_the_reader() -> None:
    async with linked() as (ours, theirs):
        reading = asyncio.create_task(take(ours, 1))
        await theirs.close()
        assert await reading == []


async def test_a_ping_that_cannot_be_answered_ends_the_reader() -> None:
    async with linked() as (ours, _):
        ping = aiohttp.WSMessage(aiohttp.WSMsgType.PING, b"", None)
        ours._socket._reader.feed_data(ping, 0)
        ours._socket._response.connection.transport.close()
        assert await take(ours, 1) == []
        with pytest.raises(LinkClosed, match="read failed: Cannot write to closing transport"):
            ours.send(Cancel("r"))


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links that wait for a tenth of the time."""
    monkeypatch.setattr(link_module, "BEAT_S", liveness.BEAT_S / 10)
    monkeypatch.setattr(liveness, "BEAT_S", liveness.BEAT_S / 10)
    monkeypatch.setattr(liveness, "SILENCE_S", liveness.SILENCE_S / 10)


async def test_a_peer_that_says_nothing_is_given_up(hasty: None) -> None:
    async with linked() as (ours, theirs):
        theirs._looking.cancel()  # its beat stops, and no connection ends
        assert await take(ours, 1) == []
        with pytest.raises(LinkClosed, match="silent"):
            ours.send(Cancel("r"))


async def test_peers_without_news_are_not_given_up(hasty: None) -> None:
    async with linked() as (ours, theirs):
        readers = [asyncio.create_task(take(link, 1)) for link in (ours, theirs)]
        await asyncio.sleep(2 * liveness.SILENCE_S)
        assert not any(link.closed for link in (ours, theirs))
        ours.send(Cancel("to them"))
        theirs.send(Cancel("to us"))
        assert await asyncio.gather(*readers) == [[Cancel("to us")], [Cancel("to them")]]


async def test_a_reader_that_is_busy_for_long_does_not_blame_its_peer(hasty: None) -> None:
    async with linked() as (ours, theirs):
        theirs.send(Cancel("first"))
        theirs.send(Cancel("second"))
        heard = []
        async for message in ours:
            heard.append(message)
            await asyncio.sleep(2 * liveness.SILENCE_S)
            if len(heard) == 2:
                break
        assert not ours.closed
        assert heard == [Cancel("first"), Cancel("second")]


async def test_a_frozen_peer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "HANDSHAKE_TIMEOUT_S", 0.05)
    # It listens and accepts nothing: the kernel opens the connection all the same.
    with create_server(("127.0.0.1", 0)) as frozen:
        async with aiohttp.ClientSession() as session:
            with pytest.raises(TimeoutError):
                await dial(session, f"127.0.0.1:{frozen.getsockname()[1]}", DIALLER)


async def test_closing_twice_is_harmless() -> None:
    async with linked() as (ours, _):
        await ours.close("first")
        await ours.close("second")
        with pytest.raises(LinkClosed, match="first"):
            ours.send(Deltas([]))

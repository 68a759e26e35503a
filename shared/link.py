"""A link: one WebSocket between two processes, multiplexing every request between them.

The upstream side dials, each side says Hello, then messages flow both ways. Sending never blocks:
frames wait in a buffer bounded in bytes. A peer that lets it fill is too slow to serve anybody, so
the link closes (LinkClosed) and whoever owns the requests places them elsewhere. So it does when
nothing comes for a while (see `liveness`): each end that has nothing to say sends an unsolicited
pong, a WebSocket's one-way heartbeat (RFC 6455, section 5.5.3).

Frames that wait together leave as one packet, which is a message of the WebSocket: sending and
receiving such a message costs more than most of ours do.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Final

import aiohttp
from aiohttp import web

from pagemesh.shared.errors import HandshakeRefused, LinkClosed
from pagemesh.shared.liveness import BEAT_S, SILENCE_S, Liveness
from pagemesh.shared.messages import Echo, Hello, Refused
from pagemesh.shared.tls import why_not_linked
from pagemesh.shared.wire import (
    MAX_FRAME_BYTES,
    MAX_PACKET_FRAMES,
    PACKET_HEAD_BYTES,
    PROTOCOL,
    BadFrame,
    Message,
    decode,
    decode_packet,
    encode,
    join_frames,
)

LINK_PATH: Final = "/link"
MAX_BUFFERED_BYTES: Final = 256 * 2**20
# aiohttp refuses what reaches its limit.
_MESSAGE_LIMIT_BYTES: Final = MAX_FRAME_BYTES + PACKET_HEAD_BYTES + 1
# No more is put together: copying costs more then than it saves.
_JOINED_BYTES: Final = 64 * 2**10
HANDSHAKE_TIMEOUT_S: Final = 5.0
DRAIN_TIMEOUT_S: Final = 1.0
# How long a closing end waits for the other's goodbye.
GOODBYE_TIMEOUT_S: Final = 1.0
# A reader with frames waiting takes them one after the other, and what they bring gathers; so often
# (of CPU time: losing the core ends no burst) the event loop turns all the same, and it leaves.
MAX_BURST_S: Final = 0.005

_SOCKET_ERRORS: Final = (OSError, aiohttp.ClientError, RuntimeError)
_GOODBYES: Final = (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED)

_Socket = aiohttp.ClientWebSocketResponse | web.WebSocketResponse


class Link:
    """An open link. `async for message in link` ends when the peer goes away.

    Owner: the task that dialled or accepted it; it must call `close`.
    """

    def __init__(self, socket: _Socket, peer: Hello) -> None:
        self.peer = peer
        self._socket = socket
        self._outbox: deque[bytes] = deque()
        self._buffered_bytes = 0
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._closed_reason: str | None = None
        self._burst: tuple[float, float] | None = None
        """When it began, by the clock and in CPU time of this thread."""
        self._observe_round_trip_s: Callable[[float], None] | None = None
        self._liveness = Liveness(time.monotonic())
        self._listening = False
        self._spoke = False
        """Whether something was sent since the last look at the peer."""
        self._beat_due = False
        self._looking = asyncio.get_running_loop().call_later(BEAT_S, self._look)
        self._closer: asyncio.Task[None] | None = None
        self._writer = asyncio.create_task(self._write_loop(), name=f"link-writer-{self.name}")

    @property
    def name(self) -> str:
        return self.peer.instance_id

    @property
    def closed(self) -> bool:
        return self._closed_reason is not None

    @property
    def closed_reason(self) -> str | None:
        """Why it closed; None while it is open."""
        return self._closed_reason

    def send(self, message: Message) -> None:
        """Queue one message. Raises LinkClosed when the link is gone or its buffer is full."""
        if self._closed_reason is not None:
            raise LinkClosed(self.name, self._closed_reason)
        frame = encode(message)
        if self._buffered_bytes + len(frame) > MAX_BUFFERED_BYTES:
            self._fail("its send buffer is full: the peer reads too slowly")
            raise LinkClosed(self.name, "send buffer full")
        self._outbox.append(frame)
        self._buffered_bytes += len(frame)
        self._drained.clear()
        self._wake.set()

    async def __aiter__(self) -> AsyncIterator[Message]:
        try:
            while (packet := await self._receive()) is not None:
                for message in decode_packet(packet):
                    if self._burst is None:
                        self._begin_burst()
                    if isinstance(message, Echo):
                        self._on_echo(message)
                    else:
                        yield message
                    if self._burst is not None and _is_long(*self._burst):
                        await asyncio.sleep(0)
        except BadFrame as error:
            self._fail(str(error))

    def _begin_burst(self) -> None:
        self._burst = time.monotonic(), time.thread_time()
        asyncio.get_running_loop().call_soon(self._end_burst)

    def _end_burst(self) -> None:
        """The event loop has turned since the burst's first frame."""
        self._burst = None

    async def measure(self, period_s: float, observe: Callable[[float], None]) -> None:
        """Until the link ends: send an echo every `period_s`, and tell `observe` the seconds each
        took to go and come back: queueing at both ends, both event loops and the network."""
        self._observe_round_trip_s = observe
        with contextlib.suppress(LinkClosed):
            while True:
                await asyncio.sleep(period_s)
                self.send(Echo(time.monotonic()))

    def _on_echo(self, echo: Echo) -> None:
        if not echo.answered:
            with contextlib.suppress(LinkClosed):
                self.send(echo._replace(answered=True))
        elif self._observe_round_trip_s is not None:
            self._observe_round_trip_s(time.monotonic() - echo.sent_s)

    def _look(self) -> None:
        """Every BEAT_S: give up a peer that is silent, and let it not think so of us."""
        if self._liveness.look(time.monotonic(), listening=self._listening):
            self._fail(f"it has been silent for {SILENCE_S:g} s")
            return
        if not self._spoke:
            self._beat_due = True
            self._wake.set()
        self._spoke = False
        self._looking = asyncio.get_running_loop().call_later(BEAT_S, self._look)

    async def _receive(self) -> bytes | None:
        """The next packet; None once the link has failed."""
        try:
            got = await self._next_message()
        except _SOCKET_ERRORS as error:
            # A ping is answered, and that may meet a transport that is closing.
            self._fail(f"read failed: {error}")
            return None
        if got.type is aiohttp.WSMsgType.BINARY:
            data: bytes = got.data
            return data
        gone = got.type in _GOODBYES
        self._fail("the peer went away" if gone else f"unexpected frame of type {got.type.name}")
        return None

    async def _next_message(self) -> aiohttp.WSMessage:
        """The socket's next that is no ping or pong."""
        while True:
            self._listening = True
            got = await self._socket.receive()
            self._listening = False
            self._liveness.heard()
            if got.type is aiohttp.WSMsgType.PING:
                await self._socket.pong(got.data)
            elif got.type is not aiohttp.WSMsgType.PONG:
                return got

    async def drained(self) -> None:
        """Return when nothing waits to be sent: the buffer is empty or the link is gone."""
        while self._buffered_bytes:
            await self._drained.wait()

    def abort(self, reason: str) -> None:
        """Close now, without what is queued. The reader's loop ends; its owner still closes."""
        self._fail(reason)

    async def close(self, reason: str = "closed") -> None:
        """Send what is queued (for at most a second), then close."""
        if self._closed_reason is None and self._buffered_bytes:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), timeout=DRAIN_TIMEOUT_S)
        self._fail(reason)
        assert self._closer is not None  # set by the _fail that won
        await asyncio.gather(self._writer, self._closer, return_exceptions=True)

    async def _write_loop(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                if self._beat_due:
                    self._beat_due = False
                    await self._socket.pong()
                while self._outbox:
                    self._spoke = True
                    frames = self._take_frames()
                    await self._socket.send_bytes(join_frames(frames))
                    self._buffered_bytes -= sum(map(len, frames))
                self._drained.set()
        except _SOCKET_ERRORS as error:
            self._fail(f"write failed: {error}")

    def _take_frames(self) -> list[bytes]:
        """The next packet's. They still count as buffered."""
        outbox = self._outbox
        frames = [outbox.popleft()]
        n_bytes = len(frames[0])
        while outbox and len(frames) < MAX_PACKET_FRAMES:
            n_bytes += len(outbox[0])
            if n_bytes > _JOINED_BYTES:
                break
            frames.append(outbox.popleft())
        return frames

    def _fail(self, reason: str) -> None:
        """The first reason wins. Closing the socket wakes the reader, so its owner notices."""
        if self._closed_reason is not None:
            return
        self._closed_reason = reason
        self._looking.cancel()
        self._outbox.clear()
        self._buffered_bytes = 0
        self._drained.set()
        if asyncio.current_task() is not self._writer:
            self._writer.cancel()
        self._closer = asyncio.create_task(self._close_socket(), name=f"link-closer-{self.name}")

    async def _close_socket(self) -> None:
        """In bounded time, whatever the peer still says: one that is cut off takes no goodbye."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._socket.close(), GOODBYE_TIMEOUT_S)


async def dial(
    session: aiohttp.ClientSession,
    address: str,
    hello: Hello,
    tls: ssl.SSLContext | None = None,
) -> Link:
    """Open a link to `address` (host:port).

    Raises HandshakeRefused when either side says no to the other, OSError or aiohttp.ClientError or
    TimeoutError when the peer cannot be reached, or is frozen.
    """
    async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
        return await _dial(session, address, hello, tls)


async def _dial(
    session: aiohttp.ClientSession, address: str, hello: Hello, tls: ssl.SSLContext | None
) -> Link:
    """See `dial`."""
    socket = await _connect(session, address, tls)
    try:
        await socket.send_bytes(encode(hello))
        answer = decode(await socket.receive_bytes())
        if isinstance(answer, Refused):
            raise HandshakeRefused(address, answer.reason)
        reason = _refusal(answer, hello)
        if reason is not None or not isinstance(answer, Hello):
            raise HandshakeRefused(address, reason or "no Hello")
    except (BadFrame, TypeError) as error:
        await socket.close()
        raise HandshakeRefused(address, str(error)) from error
    except BaseException:
        await socket.close()
        raise
    return Link(socket, answer)


async def _connect(
    session: aiohttp.ClientSession, address: str, tls: ssl.SSLContext | None
) -> aiohttp.ClientWebSocketResponse:
    """See `dial`."""
    try:
        return await session.ws_connect(
            f"{'ws' if tls is None else 'wss'}://{address}{LINK_PATH}",
            autoping=False,
            timeout=aiohttp.ClientWSTimeout(ws_close=GOODBYE_TIMEOUT_S),
            max_msg_size=_MESSAGE_LIMIT_BYTES,
            compress=0,
            ssl=True if tls is None else tls,
        )
    except (OSError, aiohttp.ClientError) as error:
        reason = why_not_linked(error, tls=tls is not None)
        if reason is None:
            raise
        raise HandshakeRefused(address, reason) from error


async def accept(
    request: web.Request, hello: Hello, refuse: Callable[[Hello], str | None] | None = None
) -> tuple[Link | None, web.WebSocketResponse]:
    """Answer a dialling peer. The link is None when it was refused; return the response anyway.

    `refuse` gives the reason to refuse a peer that could be linked.
    """
    socket = web.WebSocketResponse(
        autoping=False,
        timeout=GOODBYE_TIMEOUT_S,
        max_msg_size=_MESSAGE_LIMIT_BYTES,
        compress=False,
    )
    await socket.prepare(request)
    try:
        first = decode(await socket.receive_bytes(timeout=HANDSHAKE_TIMEOUT_S))
    except (BadFrame, TypeError, TimeoutError):
        await socket.close()
        return None, socket
    reason = _refusal(first, hello)
    if reason is None and refuse is not None and isinstance(first, Hello):
        reason = refuse(first)
    if reason is not None or not isinstance(first, Hello):
        await socket.send_bytes(encode(Refused(reason or "no Hello")))
        await socket.close()
        return None, socket
    await socket.send_bytes(encode(hello))
    return Link(socket, first), socket


def _is_long(began_s: float, cpu_began_s: float) -> bool:
    """CPU time costs a system call, and is never more than what the clock shows."""
    if time.monotonic() - began_s <= MAX_BURST_S:
        return False
    return time.thread_time() - cpu_began_s > MAX_BURST_S


def _refusal(first: Message, ours: Hello) -> str | None:
    if not isinstance(first, Hello):
        return "the first frame must be Hello"
    if first.protocol != ours.protocol:
        return f"protocol {first.protocol} is not {PROTOCOL}"
    if not hmac.compare_digest(first.secret.encode(), ours.secret.encode()):
        return "the mesh secret differs; give every service the same PAGEMESH_MESH_SECRET"
    return None

"""Streams that keep up, written without waking their handlers.

A write wakes its client. Written one by one, while the others are still being worded, each client
process falls asleep again before its next event comes; so what came in one turn of the event loop
is worded first and written back to back.

A stream keeps up while its connection holds nothing unsent. Then each arrival is an event of its
own; arrivals of one turn, which this process itself was too slow to part, make one.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Protocol

from pagemesh.gateway.generation import Generation
from pagemesh.gateway.keepalive import KEEP_ALIVE_S
from pagemesh.shared.distribution import Observations
from pagemesh.shared.messages import Delta


class Wording(Protocol):
    """How a gain is worded. Raises what it likes: that ends its own stream."""

    def event(self, gain: Delta) -> bytes:
        """Whole events, or nothing."""


class Turn:
    """The streams that gained something in this turn of the event loop."""

    def __init__(self, token_s: Observations) -> None:
        self._token_s = token_s
        self._streams: dict[LiveStream, None] = {}
        self._since_s = 0.0

    def add(self, stream: LiveStream) -> None:
        if not self._streams:
            # Not the loop's clock, which uvloop keeps in whole milliseconds.
            self._since_s = time.monotonic()
            asyncio.get_running_loop().call_soon(self._end)
        self._streams[stream] = None

    def _end(self) -> None:
        streams, self._streams = self._streams, {}
        worded = [(stream, data) for stream in streams if (data := stream.word())]
        nudge_at_s = asyncio.get_running_loop().time() + KEEP_ALIVE_S
        for stream, data in worded:
            stream.write(data, nudge_at_s)
        self._token_s.observe(time.monotonic() - self._since_s)


class LiveStream:
    """One stream while it keeps up. Its response has sent its headers, and is chunked."""

    def __init__(
        self, turn: Turn, transport: asyncio.Transport, generation: Generation, wording: Wording
    ) -> None:
        self._turn = turn
        self._unsent_bytes = transport.get_write_buffer_size
        self._write = transport.write
        self._generation = generation
        self._event = wording.event
        self._left: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Write what comes, until the handler is needed: at the end, for a comment, for a client
        that is behind, for an error. Raises what wording or writing raised."""
        with self._generation.telling(partial(self._turn.add, self)):
            await self._left

    def word(self) -> bytes:
        """The events to write now; nothing once the handler has taken over."""
        generation = self._generation
        if self._left.done():
            return b""
        if generation.wants_handler or self._unsent_bytes():
            self._left.set_result(None)
            return b""
        try:
            gains = generation.take()
            if len(gains) == 1:
                return self._event(gains[0])
            return b"".join(map(self._event, gains))
        except Exception as error:
            self._left.set_exception(error)
            return b""

    def write(self, data: bytes, nudge_at_s: float) -> None:
        """One chunk (RFC 9112, section 7.1). A transport that fails costs no other stream."""
        self._generation.nudge_at_s = nudge_at_s
        try:
            self._write(b"%x\r\n%b\r\n" % (len(data), data))
        except Exception as error:
            self._left.set_exception(error)

"""A client process that counts events: python -m parts.client '{"url": …}'. See `Load`.

It prints one JSON object, a `Counts`. Two ways to read: `raw` looks for the ends of events in what
the socket brings, the least a client can do; `aiohttp` reads as applications do.
"""

from __future__ import annotations

import asyncio
import select
import socket
import sys
import time
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final, Literal
from urllib.parse import urlsplit

import aiohttp
import msgspec
import uvloop

END: Final = b"\n\n"
NEWLINE: Final = END[0]
READ_BYTES: Final = 65536
PROMPT: Final = "Once upon a time there was a mesh of"


class Load(msgspec.Struct, kw_only=True):
    """`streams` requests at once, each for `tokens` tokens."""

    url: str
    streams: int
    tokens: int
    reader: Literal["raw", "aiohttp"] = "raw"

    def body(self) -> bytes:
        return msgspec.json.encode(
            {"prompt": PROMPT, "max_tokens": self.tokens, "ignore_eos": True, "stream": True}
        )


class Counts(msgspec.Struct, kw_only=True):
    """What came. `events` are those with text; times are seconds of CLOCK_MONOTONIC. `event_s` are
    the times of all events but the last, of a single stream only."""

    events: int
    first_s: float
    last_s: float
    cpu_s: float
    event_s: list[float] = []


class Stream:
    """Events of one answer, in bytes that are cut anywhere. A JSON text has no bare newline."""

    def __init__(self) -> None:
        self.status = b""
        self.first_s = 0.0
        self.last_s = 0.0
        self.events = 0
        self._last = 0

    def feed(self, data: bytes) -> int:
        """How many events end in `data`."""
        ended = data.count(END) + (self._last == data[0] == NEWLINE)
        self._last = data[-1]
        if not self.status:
            self.status = data[:12]
        if not self.events and ended:
            self.first_s = time.monotonic()
        self.events += ended
        return ended

    def close(self) -> None:
        self.last_s = time.monotonic()

    @property
    def text_events(self) -> int:
        """All but the last, which says that the stream is done."""
        return self.events - 1


class TimedStream(Stream):
    """A stream that knows when each of its events came, in seconds of CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        super().__init__()
        self.event_s = array("d")

    def feed(self, data: bytes) -> int:
        ended = super().feed(data)
        self.event_s.extend([time.monotonic()] * ended)
        return ended


def read_raw(load: Load, streams: Sequence[Stream]) -> None:
    """Each request on a connection of its own, which the server closes after the answer."""
    reading = {}
    with select.epoll() as epoll, ExitStack() as stack:
        for stream in streams:
            connection = stack.enter_context(ask(load))
            reading[connection.fileno()] = connection, stream
            epoll.register(connection, select.EPOLLIN)
        while reading:
            for fd, _ in epoll.poll():
                connection, stream = reading[fd]
                if data := connection.recv(READ_BYTES):
                    stream.feed(data)
                else:
                    stream.close()
                    epoll.unregister(fd)
                    del reading[fd]


def ask(load: Load) -> socket.socket:
    address, body = urlsplit(load.url), load.body()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection = socket.create_connection((address.hostname, address.port))
    connection.sendall(head.encode() + body)
    return connection


async def read_with_aiohttp(load: Load, streams: Sequence[Stream]) -> None:
    """All requests on one session, as applications do."""
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        await asyncio.gather(*(read_one(load, stream, session) for stream in streams))


async def read_one(load: Load, stream: Stream, session: aiohttp.ClientSession) -> None:
    headers = {"Content-Type": "application/json"}
    url = f"{load.url}/v1/completions"
    async with session.post(url, data=load.body(), headers=headers) as answer:
        stream.status = f"HTTP/1.1 {answer.status}".encode()
        async for data in answer.content.iter_any():
            stream.feed(data)
    stream.close()


def run(load: Load) -> Counts:
    timed = load.streams == 1
    streams = [TimedStream() if timed else Stream() for _ in range(load.streams)]
    started_s = time.process_time()
    if load.reader == "raw":
        read_raw(load, streams)
    else:
        uvloop.run(read_with_aiohttp(load, streams))
    for stream in streams:
        assert stream.status.endswith(b"200"), stream.status
    return Counts(
        events=sum(stream.text_events for stream in streams),
        first_s=min(stream.first_s for stream in streams),
        last_s=max(stream.last_s for stream in streams),
        cpu_s=time.process_time() - started_s,
        event_s=[
            t for stream in streams if isinstance(stream, TimedStream) for t in stream.event_s[:-1]
        ],
    )


def main() -> None:
    load = msgspec.json.decode(sys.argv[1], type=Load)
    print(msgspec.json.encode(run(load)).decode())


if __name__ == "__main__":
    main()

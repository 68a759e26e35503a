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
    """`streams` requests at once, each for `tokens` tokens. Who has its answer within `seconds` of
    the start asks again."""

    url: str
    streams: int
    tokens: int
    seconds: float = 0.0
    reader: Literal["raw", "aiohttp"] = "raw"

    def body(self) -> bytes:
        return msgspec.json.encode(
            {"prompt": PROMPT, "max_tokens": self.tokens, "ignore_eos": True, "stream": True}
        )


class Counts(msgspec.Struct, kw_only=True):
    """What came for `requests` requests. `events` are those with text; times are seconds of
    CLOCK_MONOTONIC. `event_s` are the times of all events but the last, of a single stream only."""

    requests: int
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


class Asking:
    """The streams of a load, in the order in which they are asked for."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.streams: list[Stream] = []
        self._end_s = time.monotonic() + load.seconds

    def begin(self) -> Stream:
        stream = TimedStream() if self.load.streams == 1 else Stream()
        self.streams.append(stream)
        return stream

    @property
    def may_go_on(self) -> bool:
        return time.monotonic() < self._end_s


def read_raw(asking: Asking) -> None:
    """Each request on a connection of its own, which the server closes after the answer."""
    reading: dict[int, tuple[socket.socket, Stream]] = {}
    with select.epoll() as epoll:

        def begin() -> None:
            stream, connection = asking.begin(), ask(asking.load)
            reading[connection.fileno()] = connection, stream
            epoll.register(connection, select.EPOLLIN)

        for _ in range(asking.load.streams):
            begin()
        while reading:
            for fd, _ in epoll.poll():
                connection, stream = reading[fd]
                if data := connection.recv(READ_BYTES):
                    stream.feed(data)
                    continue
                stream.close()
                del reading[fd]
                connection.close()
                if asking.may_go_on:
                    begin()


def ask(load: Load) -> socket.socket:
    address, body = urlsplit(load.url), load.body()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection = socket.create_connection((address.hostname, address.port))
    connection.sendall(head.encode() + body)
    return connection


async def read_with_aiohttp(asking: Asking) -> None:
    """All requests on one session, as applications do."""
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        await asyncio.gather(*(read_on(asking, session) for _ in range(asking.load.streams)))


async def read_on(asking: Asking, session: aiohttp.ClientSession) -> None:
    await read_one(asking.load, asking.begin(), session)
    while asking.may_go_on:
        await read_one(asking.load, asking.begin(), session)


async def read_one(load: Load, stream: Stream, session: aiohttp.ClientSession) -> None:
    headers = {"Content-Type": "application/json"}
    url = f"{load.url}/v1/completions"
    async with session.post(url, data=load.body(), headers=headers) as answer:
        stream.status = f"HTTP/1.1 {answer.status}".encode()
        async for data in answer.content.iter_any():
            stream.feed(data)
    stream.close()


def run(load: Load) -> Counts:
    asking = Asking(load)
    started_s = time.process_time()
    if load.reader == "raw":
        read_raw(asking)
    else:
        uvloop.run(read_with_aiohttp(asking))
    streams = asking.streams
    for stream in streams:
        assert stream.status.endswith(b"200"), stream.status
    return Counts(
        requests=len(streams),
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

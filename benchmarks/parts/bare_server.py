"""What event loop, HTTP library and kernel take alone: python -m parts.bare_server writes|requests

`writes` writes an event of a stream to each of its connections, again and again, a write each, with
nothing around it. `requests` answers with aiohttp and nothing else. Both print their port.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Final, cast

import uvloop
from aiohttp import web

from parts.drive import PATH

EVENT_BYTES: Final = 220
ANSWER_BYTES: Final = 400
_HEAD: Final = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
_EVENT: Final = b"%x\r\n%b\r\n" % (EVENT_BYTES, b"x" * EVENT_BYTES)
WIRE_BYTES: Final = len(_EVENT)


class Streams(asyncio.Protocol):
    """Each connection that asks gets events from then on."""

    open: Final[set[asyncio.Transport]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's are not made of asyncio's class.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(_HEAD)
        self.open.add(self._transport)

    def connection_lost(self, _: Exception | None) -> None:
        self.open.discard(self._transport)


async def write() -> None:
    server = await asyncio.get_running_loop().create_server(Streams, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    while True:
        for transport in Streams.open:
            if not transport.get_write_buffer_size():
                transport.write(_EVENT)
        await asyncio.sleep(0 if Streams.open else 0.01)


async def answer() -> None:
    async def handle(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=b"x" * ANSWER_BYTES, content_type="application/json")

    app = web.Application()
    app.router.add_post(PATH, handle)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    uvloop.run(write() if sys.argv[1] == "writes" else answer())

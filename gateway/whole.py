"""An answer that is there as a whole: its head is known, and leaves with it in one write.

aiohttp's Response keeps headers that anybody may change until they are sent; filling and reading
them takes longer than all that is worded here.
"""

from __future__ import annotations

from typing import Final

from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import SERVER_SOFTWARE

from pagemesh.gateway.headers import common_lines

_OK: Final = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
_SERVER: Final = f"Server: {SERVER_SOFTWARE}\r\n"


def json_answer(request: web.Request, body: bytes) -> web.StreamResponse:
    """200 with `body`."""
    if request.version == HttpVersion11:
        return _Whole(request, body)
    return web.Response(body=body, content_type="application/json")


class _Whole(web.StreamResponse):
    """The answer to a request of HTTP/1.1. Its headers are settled."""

    def __init__(self, request: web.Request, body: bytes) -> None:
        super().__init__()
        self._request = request
        self._whole = body

    @property
    def prepared(self) -> bool:
        return True

    @property
    def keep_alive(self) -> bool:
        return self._request.keep_alive

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter:
        return request.writer

    async def write_eof(self, data: bytes = b"") -> None:
        writer = self._request.writer
        await writer.write(self._head().encode() + self._whole)
        await writer.write_eof()

    def _head(self) -> str:
        ours = common_lines(self._request)
        close = "" if self._request.keep_alive else "Connection: close\r\n"
        length = f"Content-Length: {len(self._whole)}\r\nDate: {rfc822_formatted_time()}\r\n"
        return f"{_OK}{length}{_SERVER}{ours}{close}\r\n"

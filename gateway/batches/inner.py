"""Requests of the gateway to its own handlers, past HTTP: checked and answered as a client's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final, cast

from aiohttp import HttpVersion10, StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from pagemesh.gateway.batches.lines import Answered
from pagemesh.gateway.entrance import worded
from pagemesh.gateway.headers import REQUEST_ID
from pagemesh.shared.access import OWNER

_BUFFER_BYTES: Final = 2**16


class InnerRequests:
    """`routes` are those that may be asked; a body may have `max_body_bytes`."""

    def __init__(self, routes: Iterable[web.RouteDef], max_body_bytes: int) -> None:
        self._router = web.UrlDispatcher()
        self._router.add_routes(list(routes))
        self._max_body_bytes = max_body_bytes

    def knows(self, path: str) -> bool:
        return any(
            route.method == "POST"
            and route.resource is not None
            and route.resource.canonical == path
            for route in self._router.routes()
        )

    async def post(self, path: str, body: bytes, request_id: str, owner: str) -> Answered:
        """Who is cancelled meanwhile cancels what the request has begun."""
        request = self._request(path, body)
        request[REQUEST_ID], request[OWNER] = request_id, owner
        found = await self._router.resolve(request)
        try:
            answer = await found.handler(request)
        except Exception as error:
            answer = worded(request, error)
        content = answer.body if isinstance(answer, web.Response) else None
        assert isinstance(content, bytes), "an answer to HTTP/1.0 is whole"
        return Answered(answer.status, request_id, content)

    def _request(self, path: str, body: bytes) -> web.Request:
        loop = asyncio.get_running_loop()
        protocol = _NoConnection(loop)
        payload = StreamReader(protocol, _BUFFER_BYTES, loop=loop)
        payload.feed_data(body)
        payload.feed_eof()
        return web.Request(
            _head(path),
            payload,
            cast(web.RequestHandler, protocol),
            cast(AbstractStreamWriter, None),
            cast("asyncio.Task[None]", asyncio.current_task()),
            loop,
            client_max_size=self._max_body_bytes,
        )


class _NoConnection(BaseProtocol):
    """What a request asks of its connection."""

    ssl_context: Any = None
    peername: Any = None
    sockname: Any = None


def _head(path: str) -> RawRequestMessage:
    headers = CIMultiDictProxy(CIMultiDict({"Content-Type": "application/json"}))
    return RawRequestMessage(
        "POST", path, HttpVersion10, headers, (), True, None, False, False, URL(path)
    )

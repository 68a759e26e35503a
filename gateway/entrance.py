"""What surrounds every handler of a gateway, the shell's included.

One coroutine for all of it: each that wraps another costs every request more than what it does.
"""

from __future__ import annotations

import time
from typing import Final

import structlog
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from pagemesh.gateway.anthropic.errors import error_body as anthropic_body
from pagemesh.gateway.headers import (
    CORS,
    REQUEST_ID,
    Origins,
    check_encoding,
    choose_request_id,
    common_headers,
    preflight_response,
    speaks_anthropic,
)
from pagemesh.gateway.metrics import GatewayMetrics
from pagemesh.gateway.openai.errors import error_body, error_response, from_http
from pagemesh.gateway.parting import Parting
from pagemesh.gateway.random_ids import RandomIds
from pagemesh.shared.access import Access, admit, route_of
from pagemesh.shared.errors import RequestError

CLIENT_GONE: Final = 499
METHODS: Final = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
OTHER_METHOD: Final = "(other)"
UNMATCHED: Final = "(unmatched)"

log = structlog.get_logger(__name__)


class Entrance:
    """Gives each request its id, lets in whom `access` admits, words every failure, and counts what
    was answered, hang-ups too."""

    def __init__(
        self, access: Access, origins: Origins, metrics: GatewayMetrics, parting: Parting
    ) -> None:
        self._access = access
        self._origins = origins
        self._metrics = metrics
        self._parting = parting
        self._new_id = RandomIds("req_")

    def middleware(self) -> Middleware:
        @web.middleware
        async def surround(request: web.Request, handler: Handler) -> web.StreamResponse:
            status, began_s = CLIENT_GONE, time.monotonic()
            route = route_of(request)
            self._parting.asked(request)
            request[REQUEST_ID] = choose_request_id(request, self._new_id)
            request[CORS] = self._origins.headers(request.headers.get("Origin"))
            try:
                try:
                    if request.method == hdrs.METH_OPTIONS:
                        # It needs no key and no route of its own.
                        response: web.StreamResponse = preflight_response(request)
                    else:
                        check_encoding(request)
                        admit(request, route, self._access)
                        response = await handler(request)
                except Exception as error:
                    response = worded(request, error)
                if not response.prepared:
                    response.headers.update(common_headers(request))
                status = response.status
                return response
            finally:
                self._count(request, route, status, time.monotonic() - began_s)

        return surround

    def _count(self, request: web.Request, route: str, status: int, elapsed_s: float) -> None:
        method = request.method if request.method in METHODS else OTHER_METHOD
        self._metrics.answered(method, route or UNMATCHED, status, elapsed_s)
        self._parting.answered(request)


def worded(request: web.Request, error: Exception) -> web.Response:
    """The failure `error`, being handled, in the shape of its API. A bug costs its own request and
    is logged."""
    match error:
        case RequestError():
            return _refusal(request, error)
        case ConnectionError() | web.RequestPayloadError():
            return _refusal(request, RequestError(f"The body could not be read: {error}"))
        case web.HTTPException():
            refusal = _refusal(request, from_http(error, request.method, request.path))
            if "Allow" in error.headers:
                refusal.headers["Allow"] = error.headers["Allow"]
            return refusal
        case _:
            log.exception("request_failed", x_request_id=request[REQUEST_ID], path=request.path)
            return _refusal(request, RequestError("Internal error", status=500))


def _refusal(request: web.Request, error: RequestError) -> web.Response:
    return error_response(error, anthropic_body if speaks_anthropic(request) else error_body)

"""Headers that every answer carries: the request id, and CORS for browser clients."""

from __future__ import annotations

import os
import re
from typing import Final

from aiohttp import web

from pagemesh.gateway.parting import LAST_REQUEST

_SANE_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
REQUEST_ID: Final = web.RequestKey("request_id", str)


MESSAGES: Final = ("/v1/messages", "/messages")


def speaks_anthropic(request: web.BaseRequest) -> bool:
    """By the path, since what no route fits is answered too."""
    return request.path.startswith(MESSAGES)


def is_sane_id(given: str) -> bool:
    """Whether an id of a client's is fit to be logged and echoed."""
    return _SANE_ID.fullmatch(given) is not None


def choose_request_id(request: web.BaseRequest) -> str:
    """The client's own X-Request-Id when it is fit to be logged and echoed, else a new one."""
    given = request.headers.get("X-Request-Id", "")
    return given if is_sane_id(given) else f"req_{os.urandom(16).hex()}"


def common_headers(request: web.BaseRequest) -> dict[str, str]:
    more = {"connection": "close"} if LAST_REQUEST.get() else {}
    if speaks_anthropic(request):
        more["request-id"] = request[REQUEST_ID]
    return {
        **more,
        "x-request-id": request[REQUEST_ID],
        "access-control-allow-origin": "*",
        "access-control-expose-headers": "x-request-id, retry-after, retry-after-ms",
    }


def preflight_response(request: web.BaseRequest) -> web.Response:
    """Any page may call, with any header; there are no cookies to protect."""
    asked = request.headers.get("Access-Control-Request-Headers", "authorization, content-type")
    return web.Response(
        status=204,
        headers={
            "access-control-allow-methods": "GET, POST, OPTIONS",
            "access-control-allow-headers": asked,
            "access-control-max-age": "86400",
            "vary": "Access-Control-Request-Headers",
        },
    )

"""Headers that every answer carries: the request id, and CORS for browser clients."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from aiohttp import web

from pagemesh.gateway.parting import LAST_REQUEST
from pagemesh.shared.errors import RequestError

_SANE_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
MESSAGES: Final = ("/v1/messages", "/messages")
_METHODS: Final = "GET, POST, PUT, PATCH, DELETE, OPTIONS"
_READABLE: Final = {
    "access-control-expose-headers": (
        "x-request-id, request-id, retry-after, retry-after-ms, x-should-retry"
    )
}


class HeaderLines:
    """Headers, and what they are on the wire."""

    __slots__ = ("headers", "lines")

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers = headers
        self.lines = _on_wire(headers)


def _on_wire(headers: Mapping[str, str]) -> str:
    return "".join([f"{name}: {value}\r\n" for name, value in headers.items()])


REQUEST_ID: Final = web.RequestKey("request_id", str)
CORS: Final = web.RequestKey("cors", HeaderLines)


def speaks_anthropic(request: web.BaseRequest) -> bool:
    """By the path, since what no route fits is answered too."""
    return request.path.startswith(MESSAGES)


def is_sane_id(given: str) -> bool:
    """Whether an id of a client's is fit to be logged and echoed."""
    return _SANE_ID.fullmatch(given) is not None


def choose_request_id(request: web.BaseRequest, new_id: Callable[[], str]) -> str:
    """The client's own X-Request-Id when it is fit to be logged and echoed, else a new one."""
    given = request.headers.get("X-Request-Id")
    return given if given is not None and is_sane_id(given) else new_id()


def check_encoding(request: web.BaseRequest) -> None:
    """Raises RequestError (415) for a body that is compressed: nothing here unpacks it."""
    encoding = request.headers.get("Content-Encoding")
    if encoding is not None and encoding.lower() != "identity":
        raise RequestError(
            f"Send the body as it is: Content-Encoding {encoding[:40]!r} is not supported.",
            status=415,
            code="unsupported_content_encoding",
        )


class Origins:
    """The web pages that may read answers, by scheme, host and port; `*` is any."""

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(origin.strip().rstrip("/").lower() for origin in allowed)
        self._any = "*" in self._allowed
        self._to_all = HeaderLines({"access-control-allow-origin": "*", **_READABLE})
        self._to_none = HeaderLines({"vary": "Origin"})

    def headers(self, origin: str | None) -> HeaderLines:
        """For the answer to who names this `origin`. A browser keeps one from pages without any."""
        if self._any:
            return self._to_all
        if origin is None or origin.lower() not in self._allowed:
            return self._to_none
        return HeaderLines({"access-control-allow-origin": origin, "vary": "Origin", **_READABLE})


def common_headers(request: web.BaseRequest) -> dict[str, str]:
    return {"x-request-id": request[REQUEST_ID], **_rarer(request), **request[CORS].headers}


def common_lines(request: web.BaseRequest) -> str:
    """The common headers on the wire."""
    rarer = _on_wire(_rarer(request))
    return f"x-request-id: {request[REQUEST_ID]}\r\n{rarer}{request[CORS].lines}"


def _rarer(request: web.BaseRequest) -> dict[str, str]:
    headers = {"request-id": request[REQUEST_ID]} if speaks_anthropic(request) else {}
    if LAST_REQUEST.get():
        headers["connection"] = "close"
    return headers


def preflight_response(request: web.BaseRequest) -> web.Response:
    """With any header; there are no cookies to protect. Which pages may call, `Origins` says."""
    asked = request.headers.get("Access-Control-Request-Headers", "authorization, content-type")
    return web.Response(
        status=204,
        headers={
            "access-control-allow-methods": _METHODS,
            "access-control-allow-headers": asked,
            "access-control-max-age": "86400",
        },
    )

"""OpenAI's error body, its types by status, and the retry headers its clients obey."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any, Final

import msgspec
from aiohttp import web

from pagemesh.shared.errors import RequestError

RETRY_AFTER_S: Final = 1
_RETRYABLE: Final = frozenset({429, 503})
_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_CODES: Final = {
    400: "invalid_value",
    401: "invalid_api_key",
    403: "permission_denied",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    503: "service_unavailable",
}


def bad(param: str, rule: str, *, code: str = "invalid_value") -> RequestError:
    """400: the field `param` breaks `rule`, which goes on from its name."""
    return RequestError(f"{param} {rule}", code=code, param=param)


def error_body(error: RequestError) -> dict[str, Any]:
    """`code` is a string always; `type` follows from the status."""
    ours = error.status >= 500
    type_ = _TYPES.get(error.status, "server_error" if ours else "invalid_request_error")
    code = _CODES.get(error.status, "internal_error" if ours else "invalid_request")
    return {
        "error": {
            "message": error.message,
            "type": type_,
            "param": error.param,
            "code": error.code or code,
        }
    }


def error_response(
    error: RequestError, body_of: Callable[[RequestError], dict[str, Any]] = error_body
) -> web.Response:
    headers = {"x-should-retry": "false"}
    if error.status in _RETRYABLE:
        wait_s = RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
        headers = {
            "retry-after": str(ceil(wait_s)),
            "retry-after-ms": str(ceil(1000 * wait_s)),
            "x-should-retry": "true",
        }
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return web.Response(
        status=error.status,
        body=msgspec.json.encode(body_of(error)),
        content_type="application/json",
        headers=headers,
    )


def from_http(error: web.HTTPException, method: str, path: str) -> RequestError:
    """Refusals in HTTP's terms (no key, no such route, body too large) as a RequestError."""
    match error.status:
        case 401:
            return RequestError(error.text or error.reason, status=401)
        case 404:
            return RequestError(f"Unknown URL: {method} {path}", status=404, code="unknown_url")
        case 405:
            return RequestError(f"{method} is not allowed on {path}", status=405)
        case 413:
            return RequestError("The request body is too large", status=413)
        case status:
            return RequestError(error.reason, status=status)

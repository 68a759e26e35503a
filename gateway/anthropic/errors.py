"""Anthropic's error body, and its types by status."""

from __future__ import annotations

from typing import Any, Final

from pagemesh.shared.errors import RequestError

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: RequestError) -> dict[str, Any]:
    ours = error.status >= 500
    type_ = _TYPES.get(error.status, "api_error" if ours else "invalid_request_error")
    return {"type": "error", "error": {"type": type_, "message": error.message}}

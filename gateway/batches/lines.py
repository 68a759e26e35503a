"""The lines of a batch file: what is asked, and what was answered. Pure."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec
from msgspec import Raw, Struct

from pagemesh.gateway.openai.body import BodyDecoder
from pagemesh.gateway.openai.errors import bad
from pagemesh.shared.errors import RequestError

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
MAX_LINES: Final = 50_000
MAX_CUSTOM_ID_CHARS: Final = 512
# A line holds a body and little else.
LINE_ROOM_BYTES: Final = 8192


class _Asked(Struct):
    custom_id: str
    method: str
    url: str
    body: dict[str, Raw]


class _Named(Struct):
    custom_id: str | None = None


class Line(NamedTuple):
    """One request. `number` counts from 1, as editors do; `body` is JSON."""

    number: int
    custom_id: str
    url: str
    body: bytes
    model: str | None = None


class Lines:
    """Reads the lines of one file, in order: a `custom_id` may come once."""

    def __init__(self, endpoint: str | None = None) -> None:
        self._decoder = BodyDecoder(_Asked, {})
        self._endpoint = endpoint
        self._seen: set[str] = set()

    def read(self, number: int, raw: bytes) -> Line:
        """Raises RequestError; its `param` is the field at fault."""
        try:
            asked, _ = self._decoder.decode(raw)
        except RequestError as error:
            if error.code == "invalid_json":
                error.code = "invalid_json_line"
            raise
        self._check(asked)
        self._seen.add(asked.custom_id)
        model = _plain(asked.body.get("model"))
        named = model if isinstance(model, str) else None
        return Line(number, asked.custom_id, asked.url, msgspec.json.encode(asked.body), named)

    def _check(self, asked: _Asked) -> None:
        if not 0 < len(asked.custom_id) <= MAX_CUSTOM_ID_CHARS:
            raise bad("custom_id", f"must have 1 to {MAX_CUSTOM_ID_CHARS} characters")
        if asked.custom_id in self._seen:
            raise bad("custom_id", "is that of an earlier line", code="duplicate_custom_id")
        if asked.method != "POST":
            raise bad("method", "must be POST", code="invalid_method")
        allowed = ENDPOINTS if self._endpoint is None else (self._endpoint,)
        if asked.url not in allowed:
            raise bad("url", f"must be {' or '.join(allowed)} here", code="invalid_url")
        if _plain(asked.body.get("stream")):
            raise bad("body.stream", "must not be set: a batch answers as a whole")


def custom_id_of(raw: bytes) -> str | None:
    """Of a line that cannot be run, if it has one."""
    try:
        return msgspec.json.decode(raw, type=_Named).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def raw_lines(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Those that are not blank, by number. Of one that is longer only `max_bytes` come: no JSON."""
    number = 0
    while raw := file.readline(max_bytes):
        number += 1
        if raw.strip():
            yield number, raw
        while raw and not raw.endswith(b"\n"):
            raw = file.readline(max_bytes)


def _plain(raw: Raw | None) -> Any:
    return None if raw is None else msgspec.json.decode(raw)


def with_fields(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """`body` with other `fields`; its numbers stay as they were written."""
    given = msgspec.json.decode(body, type=dict[str, Raw])
    return msgspec.json.encode({**given, **fields})


class Answered(NamedTuple):
    """`body` is JSON."""

    status: int
    request_id: str
    body: bytes

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300


def answered_entry(custom_id: str, answered: Answered) -> bytes:
    """The JSON of one line of an output or error file, without its end."""
    response = {
        "status_code": answered.status,
        "request_id": answered.request_id,
        "body": Raw(answered.body),
    }
    return _entry(custom_id, response, None)


def failed_entry(custom_id: str | None, code: str, message: str, line: int | None = None) -> bytes:
    """Of a request that got no answer. `line` tells of a line that could not be read."""
    error: dict[str, Any] = {"code": code, "message": message}
    if line is not None:
        error["line"] = line
    return _entry(custom_id, None, error)


def _entry(custom_id: str | None, response: object, error: object) -> bytes:
    return msgspec.json.encode(
        {
            "id": f"batch_req_{os.urandom(12).hex()}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
    )

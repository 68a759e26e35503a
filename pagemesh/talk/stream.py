"""A server's answer, piece by piece, as a person reads it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import aiohttp
import msgspec

from pagemesh.bench.sse import EventReader, error_message
from pagemesh.shared.errors import PagemeshError

_DONE: Final = b"[DONE]"
_SHOWN_CHARS: Final = 500


class AnswerFailed(PagemeshError):
    """The server refused, or broke the answer off. `status` is its HTTP status; 200 when the answer
    had begun."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


async def pieces(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> AsyncIterator[str]:
    """The text of the first choice, as it comes. Raises AnswerFailed, aiohttp.ClientError."""
    async with session.post(url, json={**body, "stream": True}) as answer:
        if answer.status != 200:
            raise AnswerFailed(answer.status, _reason(await answer.text(errors="replace")))
        events = EventReader()
        async for data in answer.content.iter_any():
            for payload in events.feed(data):
                if payload != _DONE:
                    yield text_of(msgspec.json.decode(payload))


def text_of(chunk: Any) -> str:
    """Of one event, in either shape. Raises AnswerFailed for an error event."""
    match chunk:
        case {"error": error}:
            raise AnswerFailed(200, error_message(error))
        case {"choices": [{"delta": {"content": str(text)}}, *_]}:
            return text
        case {"choices": [{"text": str(text)}, *_]}:
            return text
    return ""


def _reason(body: str) -> str:
    try:
        return error_message(msgspec.json.decode(body)["error"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:_SHOWN_CHARS] or "no reason was given"

"""Ids of tool calls for templates that take nine letters and digits only, as Mistral's do."""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Any, Final

_NINE: Final = re.compile(r"[A-Za-z0-9]{9}")
_WANTS_NINE: Final = re.compile(r"length\s*[!=]=\s*9\b")


def wants_short_ids(template: str) -> bool:
    return _WANTS_NINE.search(template) is not None


def with_short_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same chat; equal ids stay equal, and different ones different but for a collision of
    36 bits."""
    return [_with_short_ids(message) for message in messages]


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if calls is not None:
        calls = [{**call, "id": _short(call.get("id", ""))} for call in calls]
        message = {**message, "tool_calls": calls}
    if "tool_call_id" in message:
        message = {**message, "tool_call_id": _short(message["tool_call_id"])}
    return message


def _short(call_id: object) -> str:
    text = str(call_id)
    if _NINE.fullmatch(text):
        return text
    return blake2b(text.encode(errors="replace"), digest_size=5).hexdigest()[:9]

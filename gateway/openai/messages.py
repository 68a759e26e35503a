"""The shape of chat messages. What they mean is the template's business, one service down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pagemesh.gateway.openai.body import MAX_VALUES, check_plain
from pagemesh.gateway.openai.errors import bad

MAX_MESSAGES: Final = 4096
MAX_MESSAGE_FIELDS: Final = 64
ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
KNOWN_FIELDS: Final = frozenset(
    {
        "annotations",
        "audio",
        "content",
        "function_call",
        "name",
        "reasoning",
        "reasoning_content",
        "refusal",
        "role",
        "tool_call_id",
        "tool_calls",
    }
)


def checked_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages without their null fields (null means absent).

    Raises RequestError (400) naming the message, and the part of it, at fault.
    """
    check_count(messages)
    n_fields = max(map(len, messages))
    if n_fields > MAX_MESSAGE_FIELDS:
        raise bad("messages", f"may have {MAX_MESSAGE_FIELDS} fields each, got {n_fields}")
    left = MAX_VALUES
    for i, message in enumerate(messages):
        left = check_plain(message, f"messages[{i}]", left)
    return [_checked(message, f"messages[{i}]") for i, message in enumerate(messages)]


def check_count(messages: list[dict[str, Any]]) -> None:
    """Raises RequestError (400) for none, or too many."""
    if not messages:
        raise bad("messages", "must hold at least one message")
    if len(messages) > MAX_MESSAGES:
        raise bad("messages", f"must hold at most {MAX_MESSAGES} messages, got {len(messages)}")


def unknown_fields(messages: list[dict[str, Any]]) -> list[str]:
    """The names, once each, of the fields nobody but a chat template may know."""
    return sorted(set().union(*messages) - KNOWN_FIELDS)


def _checked(message: dict[str, Any], where: str) -> dict[str, Any]:
    message = {name: value for name, value in message.items() if value is not None}
    role = message.get("role")
    if role not in ROLES:
        raise bad(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    _check_tool_calls(message, where)
    _check_content(message, where)
    return message


def _check_content(message: dict[str, Any], where: str) -> None:
    content = message.get("content")
    if content is None:
        # An assistant turn may consist of tool calls, or of reasoning that was cut short.
        if message["role"] != "assistant":
            raise bad(f"{where}.content", "must be a string or a list of text parts")
        message["content"] = None
    elif isinstance(content, list):
        for i, part in enumerate(content):
            _check_part(part, f"{where}.content[{i}]")
    elif not isinstance(content, str):
        raise bad(f"{where}.content", "must be a string or a list of text parts")


def string_in(fields: Mapping[str, Any], name: str, where: str) -> str:
    """The field of what stands at `where`. Raises RequestError (400) if it is no string."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise bad(f"{where}.{name}", "must be a string")
    return value


def _check_part(part: object, where: str) -> None:
    if not isinstance(part, dict):
        raise bad(where, "must be an object with a type")
    if part.get("type") != "text":
        kind = str(part.get("type"))[:40]
        raise bad(f"{where}.type", f"{kind!r} is not supported: this model reads text parts only")
    string_in(part, "text", where)


def _check_tool_calls(message: dict[str, Any], where: str) -> None:
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list):
        raise bad(f"{where}.tool_calls", "must be a list")
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise bad(f"{where}.tool_calls[{i}].function", "must be an object")
        for name in ("name", "arguments"):
            string_in(function, name, f"{where}.tool_calls[{i}].function")

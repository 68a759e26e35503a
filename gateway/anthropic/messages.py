"""From Anthropic's messages to those of chat completions. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from pagemesh.gateway.openai.body import MAX_VALUES, check_plain
from pagemesh.gateway.openai.errors import bad
from pagemesh.gateway.openai.messages import check_count, string_in

ROLES: Final = ("user", "assistant", "system")
_Block = dict[str, Any]
_Message = dict[str, Any]


def chat_messages(
    system: str | list[_Block] | None, messages: list[dict[str, Any]]
) -> list[_Message]:
    """`system` goes in front; each result of a tool becomes a message of its own.

    Raises RequestError (400) naming the message, and the block of it, at fault.
    """
    check_count(messages)
    found = [] if not system else [{"role": "system", "content": _text(system, "system")}]
    left = MAX_VALUES
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        left = check_plain(message, where, left)
        found += _translated(message, where)
    return found


def continues_last(messages: list[dict[str, Any]]) -> bool:
    """Whether the answer goes on where the last message, the assistant's own, stops."""
    return messages[-1].get("role") == "assistant"


def _translated(message: dict[str, Any], where: str) -> list[_Message]:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise bad(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    where = f"{where}.content"
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = _blocks(content, where)
    if role == "assistant":
        return [_of_assistant(blocks)]
    return list(_of_user(role, blocks))


def _of_user(role: str, blocks: list[tuple[str, _Block]]) -> Iterator[_Message]:
    """Neighbouring texts stay together."""
    parts: list[_Block] = []
    for where, block in blocks:
        if block["type"] == "text":
            parts.append(_text_part(block, where))
            continue
        if block["type"] != "tool_result":
            raise _wrong_kind(block, where)
        if parts:
            yield {"role": role, "content": parts}
            parts = []
        yield _tool_message(block, where)
    if parts:
        yield {"role": role, "content": parts}


def _tool_message(block: _Block, where: str) -> _Message:
    content = block.get("content")
    return {
        "role": "tool",
        "tool_call_id": string_in(block, "tool_use_id", where),
        "content": "" if content is None else _text(content, f"{where}.content"),
    }


def _of_assistant(blocks: list[tuple[str, _Block]]) -> _Message:
    """What was thought, said and called, in one message. Thoughts in cipher say nothing here."""
    parts: list[_Block] = []
    thoughts: list[str] = []
    calls: list[_Block] = []
    for where, block in blocks:
        match block["type"]:
            case "text":
                parts.append(_text_part(block, where))
            case "thinking":
                thoughts.append(string_in(block, "thinking", where))
            case "tool_use":
                calls.append(_call(block, where))
            case "redacted_thinking":
                pass
            case _:
                raise _wrong_kind(block, where)
    message: _Message = {"role": "assistant", "content": parts or None}
    if thoughts:
        message["reasoning_content"] = message["reasoning"] = "\n".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _call(block: _Block, where: str) -> _Block:
    arguments = block.get("input", {})
    if not isinstance(arguments, dict):
        raise bad(f"{where}.input", "must be an object")
    function = {
        "name": string_in(block, "name", where),
        "arguments": msgspec.json.encode(arguments).decode(),
    }
    return {"id": string_in(block, "id", where), "type": "function", "function": function}


def _text(content: object, where: str) -> str | list[_Block]:
    """A string, or blocks of text alone."""
    if isinstance(content, str):
        return content
    blocks = _blocks(content, where)
    for at, block in blocks:
        if block["type"] != "text":
            raise _wrong_kind(block, at)
    return [_text_part(block, at) for at, block in blocks]


def _blocks(content: object, where: str) -> list[tuple[str, _Block]]:
    """Each with its place."""
    if not isinstance(content, list):
        raise bad(where, "must be a string or a list of blocks")
    blocks = [(f"{where}[{i}]", block) for i, block in enumerate(content)]
    for at, block in blocks:
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise bad(at, "must be an object with a type")
    return blocks


def _text_part(block: _Block, where: str) -> _Block:
    return {"type": "text", "text": string_in(block, "text", where)}


def _wrong_kind(block: _Block, where: str) -> Exception:
    kind = block["type"][:40]
    return bad(f"{where}.type", f"{kind!r} is not supported here: this model reads text")

"""From items to the messages of a chat. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pagemesh.gateway.openai.responses.items import Item

Message = dict[str, Any]


def chat_messages(instructions: str | None, items: Iterable[Item]) -> list[Message]:
    """`items` have been checked. What the model did in one turn, its reasoning, its text and its
    calls, becomes one message."""
    messages: list[Message] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        match item["type"]:
            case "message":
                _add_message(messages, item)
            case "function_call":
                _turn(messages).setdefault("tool_calls", []).append(_call(item))
            case "function_call_output":
                output = item["output"]
                content = output if isinstance(output, str) else _joined(output)
                message = {"role": "tool", "tool_call_id": item["call_id"], "content": content}
                messages.append(message)
            case "reasoning":
                _add_reasoning(messages, item)
    return messages


def _add_message(messages: list[Message], item: Item) -> None:
    text = _joined(item["content"])
    if item["role"] != "assistant":
        messages.append({"role": item["role"], "content": text})
    elif _only_thought(messages):
        messages[-1]["content"] = text
    else:
        messages.append({"role": "assistant", "content": text})


def _add_reasoning(messages: list[Message], item: Item) -> None:
    thoughts = _joined(item["content"] or item["summary"])
    if _only_thought(messages):
        thoughts = "\n".join([messages.pop()["reasoning_content"], thoughts])
    messages.append({"role": "assistant", "content": None, "reasoning_content": thoughts})


def _only_thought(messages: list[Message]) -> bool:
    """Whether the last message is a turn of the model that has but begun."""
    if not messages:
        return False
    last = messages[-1]
    return last["role"] == "assistant" and last["content"] is None and "tool_calls" not in last


def _turn(messages: list[Message]) -> Message:
    """The message of the model to which a call belongs."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _call(item: Item) -> dict[str, Any]:
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _joined(parts: list[Item]) -> str:
    return "".join([part.get("text") or part.get("refusal") or "" for part in parts])


def turn_starts(messages: list[Message]) -> list[int]:
    """Where the conversation may begin when what is older is left out: at each message of the
    user but the first."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    return users[1:]


def begun_at(messages: list[Message], start: int) -> list[Message]:
    """Without what was said before `start`, but with what the system says."""
    kept = [each for each in messages[:start] if each["role"] in ("system", "developer")]
    return kept + messages[start:]

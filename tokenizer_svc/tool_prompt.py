"""Tools, calls and results in plain text, for a chat template that does not know them.

The words are those that Hermes and Qwen 2.5 models were trained on; other models follow them more
or less. Calls come back in the format of the parser `hermes`.
"""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any, Final

_BEFORE: Final = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_BEHIND: Final = """
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""

_Message = dict[str, Any]


def with_tools_as_text(messages: list[_Message], tools: list[_Message]) -> list[_Message]:
    """The same chat without the role `tool` and the field `tool_calls`.

    `messages` are normalised, with contents as strings. Results that follow each other share a
    turn of the user.
    """
    chat: list[_Message] = []
    for is_result, group in groupby(messages, lambda message: message["role"] == "tool"):
        if is_result:
            chat.append({"role": "user", "content": "\n".join(map(_result, group))})
        else:
            chat += map(_with_calls, group)
    return _with_signatures(chat, tools) if tools else chat


def _result(message: _Message) -> str:
    return f"<tool_response>\n{message['content']}\n</tool_response>"


def _with_calls(message: _Message) -> _Message:
    calls = [_call(call.get("function")) for call in message.get("tool_calls", [])]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    kept["content"] = "\n".join(filter(None, [message["content"], *calls]))
    return kept


def _call(function: Any) -> str:
    return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"


def _with_signatures(chat: list[_Message], tools: list[_Message]) -> list[_Message]:
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = f"{_BEFORE}{signatures}{_BEHIND}"
    if chat and chat[0]["role"] == "system":
        first = {**chat[0], "content": f"{chat[0]['content']}\n\n{text}"}
        return [first, *chat[1:]]
    return [{"role": "system", "content": text}, *chat]

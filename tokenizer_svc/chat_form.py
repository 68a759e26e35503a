"""What a chat template wants of messages, tools and calls, found by rendering probes."""

from __future__ import annotations

from itertools import product
from typing import Any, Final

from pagemesh.shared.errors import RequestError
from pagemesh.tokenizer_svc.call_ids import wants_short_ids, with_short_ids
from pagemesh.tokenizer_svc.messages import (
    OBJECT_CALLS,
    STRING_FORMS,
    CallForm,
    content_forms,
    normalise,
)
from pagemesh.tokenizer_svc.templates import ChatTemplate
from pagemesh.tokenizer_svc.tool_prompt import with_tools_as_text

_Message = dict[str, Any]
_PROBE: Final = "probe_of_calls"
_HELLO: Final[_Message] = {"role": "user", "content": "hello"}


class ChatForm:
    """Of one template. `knows_tools`: it renders the tools that it is given."""

    def __init__(self, template: ChatTemplate) -> None:
        self.knows_tools: Final = _knows_tools(template)
        self._contents = content_forms(template)
        self._calls = _call_form(template)
        self._wants_short_ids = wants_short_ids(template.source)

    def chat(self, messages: list[_Message], tools: list[_Message]) -> list[_Message]:
        """A fresh copy of `messages` as the template wants them. Raises RequestError (400) naming
        the message and the field at fault."""
        if not self.knows_tools and (tools or any(map(_is_of_tools, messages))):
            messages = with_tools_as_text(normalise(messages, STRING_FORMS), tools)
        chat = normalise(messages, self._contents, self._calls)
        return with_short_ids(chat) if self._wants_short_ids else chat


def _is_of_tools(message: _Message) -> bool:
    return message.get("role") == "tool" or bool(message.get("tool_calls"))


def _knows_tools(template: ChatTemplate) -> bool:
    function = {"name": _PROBE, "description": "", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    return _shows_probe(template, [_HELLO], {"tools": tools})


def _call_form(template: ChatTemplate) -> CallForm:
    """The first one in which the template renders an assistant's call."""
    for null_content, as_text in product((False, True), repeat=2):
        arguments = "{}" if as_text else {}
        function = {"name": _PROBE, "arguments": arguments}
        turn = {
            "role": "assistant",
            "content": None if null_content else "",
            "tool_calls": [{"id": "000000000", "type": "function", "function": function}],
        }
        if _shows_probe(template, [_HELLO, turn], {}):
            return CallForm(as_text, null_content)
    return OBJECT_CALLS


def _shows_probe(template: ChatTemplate, chat: list[_Message], variables: dict[str, Any]) -> bool:
    try:
        text = template.render(chat, add_generation_prompt=False, variables=variables)
    except RequestError:
        return False
    return _PROBE in text

"""Chat messages in the form a template wants."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

from pagemesh.shared.errors import RequestError
from pagemesh.tokenizer_svc.templates import ChatTemplate

ContentForm = Literal["string", "parts", "either"]
ROLES: Final = ("system", "user", "assistant", "tool", "function")
STRING_FORMS: Final[dict[str, ContentForm]] = dict.fromkeys(ROLES, "string")
_TEXT_PARTS: Final = ("text", "input_text", "output_text")
_REASONING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning")
_PROBE: Final = "probe-of-content"


class CallForm(NamedTuple):
    """How a template wants an assistant's calls: their arguments as an object or as JSON text, and
    beside them a content that is empty or none."""

    as_text: bool = False
    null_content: bool = False


OBJECT_CALLS: Final = CallForm()


def normalise(
    messages: list[dict[str, Any]],
    forms: Mapping[str, ContentForm],
    call_form: CallForm = OBJECT_CALLS,
) -> list[dict[str, Any]]:
    """A fresh copy of `messages` for a template whose content forms are `forms`, by role.

    Raises RequestError (400) naming the message and the field at fault.
    """
    return [
        _message(message, f"messages[{i}]", forms, call_form) for i, message in enumerate(messages)
    ]


def _message(
    message: dict[str, Any], where: str, forms: Mapping[str, ContentForm], call_form: CallForm
) -> dict[str, Any]:
    role = _role(message, where)
    given = {key: value for key, value in message.items() if value is not None}
    given |= {"role": role, "content": _content(given.get("content", ""), where, forms[role])}
    if "tool_calls" in given:
        calls = _tool_calls(given.pop("tool_calls"), f"{where}.tool_calls", call_form)
        # Some templates take an empty list for a call.
        given |= {"tool_calls": calls} if calls else {}
        if calls and call_form.null_content and not given["content"]:
            given["content"] = None
    reasoning = next((given[key] for key in _REASONING_FIELDS if key in given), None)
    if reasoning is not None:
        given = {"thinking": reasoning, **given, "reasoning_content": reasoning}
    return given


def _role(message: dict[str, Any], where: str) -> str:
    role = message.get("role")
    if role == "developer":
        return "system"
    if role not in ROLES:
        raise _bad(where, f"role must be one of {', '.join(ROLES)} or developer, not {role!r}")
    return str(role)


def _content(content: Any, where: str, form: ContentForm) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if form == "parts" else content
    if not isinstance(content, list):
        raise _bad(where, f"content must be a string or a list of parts, not {content!r}")
    texts = [_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    if form == "string":
        return "\n".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS:
        raise _bad(where, f"this model reads text only; a part of type {kind!r} cannot be used")
    text = part.get("text")
    if not isinstance(text, str):
        raise _bad(where, f"text must be a string, not {text!r}")
    return text


def _tool_calls(calls: Any, where: str, form: CallForm) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise _bad(where, "must be a list of objects")
    return calls if form.as_text else [_tool_call(call) for call in calls]


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """Arguments travel as a JSON string; most templates want the object it holds."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": _arguments(function["arguments"])}}


def _arguments(text: str) -> Any:
    """What a model once wrote may be broken JSON: then the template gets it as it was."""
    try:
        parsed = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return parsed if isinstance(parsed, dict) else text


def _bad(where: str, problem: str) -> RequestError:
    return RequestError(f"{where}: {problem}", param="messages")


def content_forms(template: ChatTemplate) -> dict[str, ContentForm]:
    """What `template` wants as the content of each role, found by rendering a probe both ways."""
    return {role: _form(template, role) for role in ROLES}


def _form(template: ChatTemplate, role: str) -> ContentForm:
    if not _renders(template, role, [{"type": "text", "text": _PROBE}]):
        return "string"
    return "either" if _renders(template, role, _PROBE) else "parts"


def _renders(template: ChatTemplate, role: str, content: str | list[dict[str, Any]]) -> bool:
    """Whether the probe's text comes out, and as text, not as a list printed whole."""
    before: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    if role == "system":
        chat = [{"role": role, "content": content}, *before]
    elif role == "user":
        chat = [{"role": role, "content": content}]
    else:
        chat = [*before, {"role": role, "content": content}]
    try:
        text = template.render(chat, add_generation_prompt=False, variables={})
    except RequestError:
        return False
    return _PROBE in text and "'text'" not in text and '"text"' not in text

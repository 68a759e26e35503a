"""Items: what a conversation consists of in the Responses API. Their shapes are checked here.

The id of an item names the response that it came with, whose state holds it: so a client may send
the id alone, as `item_reference`.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable
from typing import Any, Final, Literal

from pagemesh.gateway.openai.body import MAX_VALUES, check_plain
from pagemesh.gateway.openai.errors import bad
from pagemesh.gateway.openai.messages import MAX_MESSAGES, string_in

Item = dict[str, Any]
ROLES: Final = ("user", "assistant", "system", "developer")
REFERENCE: Final = "item_reference"
RESPONSE: Final = "resp_"
RESPONSE_ID: Final = re.compile(r"resp_[0-9a-f]{32}")
_ID: Final = re.compile(r"[a-z]+_(?P<home>[0-9a-f]{32})[io][0-9]+")
_PREFIXES: Final = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}
_SEALED: Final = "pagemesh-reasoning."


def item_id(response_id: str, kind: str, side: Literal["i", "o"], number: int) -> str:
    """Of the item `number` of a response's input or output."""
    return f"{_PREFIXES[kind]}_{response_id.removeprefix(RESPONSE)}{side}{number}"


def home_of(an_item_id: str) -> str | None:
    """The id of the response that holds the item; None if it is no id of ours."""
    found = _ID.fullmatch(an_item_id)
    return None if found is None else RESPONSE + found["home"]


def input_items(given: str | list[Item], response_id: str) -> list[Item]:
    """`given` as items with ids, references as they are.

    Raises RequestError (400) naming the item, and the part of it, at fault.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if len(given) > MAX_MESSAGES:
        raise bad("input", f"must hold at most {MAX_MESSAGES} items, got {len(given)}")
    left = MAX_VALUES
    for i, item in enumerate(given):
        left = check_plain(item, f"input[{i}]", left)
    items = [_checked(item, f"input[{i}]") for i, item in enumerate(given)]
    return [_with_id(item, response_id, number) for number, item in enumerate(items)]


def _with_id(item: Item, response_id: str, number: int) -> Item:
    if item["type"] == REFERENCE:
        return item
    return {"id": item_id(response_id, item["type"], "i", number), **item}


def _checked(item: Item, where: str) -> Item:
    item = {name: value for name, value in item.items() if value is not None}
    kind = item.get("type") or ("message" if "role" in item else REFERENCE)
    check = _CHECKS.get(kind) if isinstance(kind, str) else None
    if check is None:
        raise bad(
            f"{where}.type", f"{str(kind)[:40]!r} is not supported. Known: {', '.join(_CHECKS)}"
        )
    return {"type": kind, **check(item, where)}


def _message(item: Item, where: str) -> Item:
    role = item.get("role")
    if role not in ROLES:
        raise bad(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    of_model = role == "assistant"
    content = item.get("content")
    if isinstance(content, str):
        content = [{"type": "output_text" if of_model else "input_text", "text": content}]
    if not isinstance(content, list):
        raise bad(f"{where}.content", "must be a string or a list of parts")
    parts = [_part(part, f"{where}.content[{j}]", of_model) for j, part in enumerate(content)]
    return {"role": role, "status": "completed", "content": parts}


def _part(part: object, where: str, of_model: bool) -> Item:
    kind, text = _kind_and_text(part, where, ("input_text", "output_text", "text", "refusal"))
    if kind == "refusal":
        return {"type": "refusal", "refusal": text}
    if of_model:
        return {"type": "output_text", "text": text, "annotations": []}
    return {"type": "input_text", "text": text}


def _kind_and_text(part: object, where: str, kinds: tuple[str, ...]) -> tuple[str, str]:
    if not isinstance(part, dict):
        raise bad(where, "must be an object with a type")
    kind = part.get("type")
    if kind not in kinds:
        raise bad(
            f"{where}.type",
            f"{str(kind)[:40]!r} is not supported: this model reads text parts only",
        )
    name = "refusal" if kind == "refusal" else "text"
    return kind, string_in(part, name, where)


def _call(item: Item, where: str) -> Item:
    texts = {name: string_in(item, name, where) for name in ("call_id", "name", "arguments")}
    return {"status": "completed", **texts}


def _call_output(item: Item, where: str) -> Item:
    output = item.get("output")
    if isinstance(output, list):
        for j, part in enumerate(output):
            _kind_and_text(part, f"{where}.output[{j}]", ("input_text", "output_text", "text"))
        output = [{"type": "input_text", "text": part["text"]} for part in output]
    elif not isinstance(output, str):
        raise bad(f"{where}.output", "must be a string or a list of text parts")
    return {"status": "completed", "call_id": string_in(item, "call_id", where), "output": output}


def _reasoning(item: Item, where: str) -> Item:
    """What the model thought stands in `content`, or sealed; a summary is the next best."""
    thoughts = _texts(item, "content", where, "reasoning_text")
    summary = _texts(item, "summary", where, "summary_text")
    if not thoughts and isinstance(item.get("encrypted_content"), str):
        thoughts = [_unsealed(item["encrypted_content"], f"{where}.encrypted_content")]
    return {
        "summary": [{"type": "summary_text", "text": text} for text in summary],
        "content": [{"type": "reasoning_text", "text": text} for text in thoughts],
    }


def _texts(item: Item, name: str, where: str, kind: str) -> list[str]:
    parts = item.get(name, [])
    if not isinstance(parts, list):
        raise bad(f"{where}.{name}", "must be a list of parts")
    return [
        _kind_and_text(part, f"{where}.{name}[{j}]", (kind,))[1] for j, part in enumerate(parts)
    ]


def sealed(thoughts: str) -> str:
    """For clients that keep reasoning as something they cannot read. It is no secret: the same
    text stands beside it."""
    return _SEALED + base64.urlsafe_b64encode(thoughts.encode()).decode()


def _unsealed(content: str, where: str) -> str:
    begun, _, coded = content.partition(_SEALED)
    try:
        if begun or not coded:
            raise ValueError
        return base64.b64decode(coded, altchars="-_", validate=True).decode()
    except (ValueError, binascii.Error) as error:
        raise bad(where, "is of another server, which alone can read it") from error


def _reference(item: Item, where: str) -> Item:
    return {"id": string_in(item, "id", where)}


_CHECKS: Final[dict[str, Callable[[Item, str], Item]]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _call_output,
    "reasoning": _reasoning,
    REFERENCE: _reference,
}

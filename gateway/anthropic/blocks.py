"""An answer as Anthropic's content blocks: one after the other, each of one kind. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from pagemesh.gateway.tools.events import Arguments, CallStart, Content, Event, Reasoning

SIGNATURE: Final = "pagemesh"
"""Of what was thought. Nobody checks it, and clients keep no thoughts that have none."""


class BlockStream:
    """Events of a stream, without their frame."""

    def __init__(self) -> None:
        self.has_called = False
        self._index = -1
        self._kind: str | None = None

    def word(self, events: Iterable[Event]) -> Iterator[dict[str, Any]]:
        for event in events:
            match event:
                case CallStart():
                    self.has_called = True
                    yield from self._begin(_tool_use(event, {}))
                case Arguments(_, text):
                    yield self._delta({"type": "input_json_delta", "partial_json": text})
                case Content(text) if text:
                    yield from self._open("text", {"type": "text", "text": ""})
                    yield self._delta({"type": "text_delta", "text": text})
                case Reasoning(text) if text:
                    block = {"type": "thinking", "thinking": "", "signature": ""}
                    yield from self._open("thinking", block)
                    yield self._delta({"type": "thinking_delta", "thinking": text})

    def end(self) -> Iterator[dict[str, Any]]:
        """Close the block that is open, if one is."""
        if self._kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        if self._kind is not None:
            yield {"type": "content_block_stop", "index": self._index}
        self._kind = None

    def _open(self, kind: str, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self._kind != kind:
            yield from self._begin(block)

    def _begin(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self.end()
        self._index += 1
        self._kind = block["type"]
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def whole_blocks(events: Iterable[Event]) -> list[dict[str, Any]]:
    """The blocks of a complete answer."""
    blocks: list[dict[str, Any]] = []
    calls: dict[int, tuple[CallStart, list[str]]] = {}
    for event in events:
        match event:
            case CallStart(number):
                calls[number] = (event, [])
                blocks.append({"type": "tool_use", "id": number})
            case Arguments(number, text):
                calls[number][1].append(text)
            case Content(text) if text:
                _append(blocks, {"type": "text", "text": text}, "text")
            case Reasoning(text) if text:
                thought = {"type": "thinking", "thinking": text, "signature": SIGNATURE}
                _append(blocks, thought, "thinking")
    return [_called(*calls[each["id"]]) if each["type"] == "tool_use" else each for each in blocks]


def _append(blocks: list[dict[str, Any]], block: dict[str, Any], key: str) -> None:
    """To the last block, if it is of the same kind."""
    if blocks and blocks[-1]["type"] == block["type"]:
        blocks[-1][key] += block[key]
    else:
        blocks.append(block)


def _called(start: CallStart, pieces: list[str]) -> dict[str, Any]:
    """Arguments that were cut short, or are no object, are text: nobody should act by them."""
    text = "".join(pieces)
    try:
        arguments = msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.MsgspecError:
        return {"type": "text", "text": text}
    return _tool_use(start, arguments)


def _tool_use(start: CallStart, arguments: dict[str, Any]) -> dict[str, Any]:
    call_id = "toolu_" + start.id.removeprefix("call_")
    return {"type": "tool_use", "id": call_id, "name": start.name, "input": arguments}

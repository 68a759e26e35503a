"""The output items of a response while they grow, and the events that tell of it. Pure."""

from __future__ import annotations

from typing import Any, Final, Literal

from pagemesh.gateway.openai.logprobs import chat_logprobs
from pagemesh.gateway.openai.responses.items import Item, item_id, sealed
from pagemesh.gateway.tools.events import Arguments, CallStart, Content, Event, Reasoning
from pagemesh.shared.messages import TokenLogprob

Status = Literal["completed", "incomplete"]
StreamEvent = dict[str, Any]
"""Without its sequence number."""


class Output:
    """The items in order; the last one may still grow. `seals`: reasoning is also sent sealed."""

    def __init__(self, response_id: str, *, seals: bool) -> None:
        self.items: list[Item] = []
        self._response_id = response_id
        self._seals = seals
        self._open: _TextItem | _CallItem | None = None
        self._rows: list[TokenLogprob] = []

    def add(self, events: list[Event], rows: list[TokenLogprob]) -> list[StreamEvent]:
        """`rows` are the logprobs of the tokens that brought `events`, if they were asked for.
        Those of reasoning and of calls have no place to be told."""
        self._rows += rows
        told: list[StreamEvent] = []
        for event in events:
            told += self._add(event)
        if events and not isinstance(events[-1], Content):
            self._rows.clear()
        return told

    def finish(self, status: Status) -> list[StreamEvent]:
        """Close the item that is open. An answer of nothing is a message without text."""
        told: list[StreamEvent] = []
        if self._open is None and not self.items:
            told += self._begin(_MESSAGE)
        return told + self._close(status)

    def _add(self, event: Event) -> list[StreamEvent]:
        match event:
            case CallStart(_, call_id, name):
                return self._close("completed") + self._begin_call(call_id, name)
            case Arguments(_, text):
                assert isinstance(self._open, _CallItem)
                return [self._open.grow(text)] if text else []
            case Content("") | Reasoning(""):
                return []
            case Content(text):
                told = self._turn_to(_MESSAGE)
                rows, self._rows = self._rows, []
                return [*told, self._text_item.grow(text, rows)]
            case Reasoning(text):
                return [*self._turn_to(_REASONING), self._text_item.grow(text, [])]

    @property
    def _text_item(self) -> _TextItem:
        assert isinstance(self._open, _TextItem)
        return self._open

    def _turn_to(self, kind: _TextKind) -> list[StreamEvent]:
        if isinstance(self._open, _TextItem) and self._open.kind is kind:
            return []
        return self._close("completed") + self._begin(kind)

    def _begin(self, kind: _TextKind) -> list[StreamEvent]:
        index = len(self.items)
        item = {"id": item_id(self._response_id, kind.item, "o", index), **kind.begun}
        self._open = _TextItem(kind, item, index)
        self.items.append(item)
        return self._open.begin()

    def _begin_call(self, call_id: str, name: str) -> list[StreamEvent]:
        index = len(self.items)
        item: Item = {
            "id": item_id(self._response_id, "function_call", "o", index),
            "type": "function_call",
            "status": "in_progress",
            "arguments": "",
            "call_id": call_id,
            "name": name,
        }
        self._open = _CallItem(item, index)
        self.items.append(item)
        return [_item_event("added", index, item)]

    def _close(self, status: Status) -> list[StreamEvent]:
        if self._open is None:
            return []
        closed, self._open = self._open, None
        told = closed.end(status, self._rows)
        self._rows = []
        item = self.items[-1] = closed.item
        if self._seals and item["type"] == "reasoning":
            item["encrypted_content"] = sealed(item["content"][0]["text"])
        return [*told, _item_event("done", len(self.items) - 1, item)]


class _TextKind:
    """How an item of text is called, and its events."""

    def __init__(self, item: str, events: str, begun: Item, part: Item) -> None:
        self.item: Final = item
        self.events: Final = events
        self.begun: Final = begun
        self.part: Final = part


_MESSAGE: Final = _TextKind(
    "message",
    "response.output_text",
    {"type": "message", "status": "in_progress", "role": "assistant", "content": []},
    {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
)
_REASONING: Final = _TextKind(
    "reasoning",
    "response.reasoning_text",
    {"type": "reasoning", "status": "in_progress", "summary": [], "content": []},
    {"type": "reasoning_text", "text": ""},
)


class _TextItem:
    """A message or reasoning: one part of text."""

    def __init__(self, kind: _TextKind, item: Item, index: int) -> None:
        self.kind = kind
        self.item = item
        self._at = {"item_id": item["id"], "output_index": index, "content_index": 0}
        self._index = index
        self._texts: list[str] = []
        self._logprobs: list[Any] = []

    def begin(self) -> list[StreamEvent]:
        return [
            _item_event("added", self._index, self.item),
            self._part_event("added", self.kind.part),
        ]

    def grow(self, text: str, rows: list[TokenLogprob]) -> StreamEvent:
        self._texts.append(text)
        delta: StreamEvent = {"type": f"{self.kind.events}.delta", **self._at, "delta": text}
        return delta | self._with_logprobs(self._take(rows))

    def end(self, status: Status, rows: list[TokenLogprob]) -> list[StreamEvent]:
        self._take(rows)
        text = "".join(self._texts)
        logprobs = self._with_logprobs(self._logprobs)
        part = self.kind.part | {"text": text} | logprobs
        self.item = self.item | {"status": status, "content": [part]}
        done = {"type": f"{self.kind.events}.done", **self._at, "text": text, **logprobs}
        return [done, self._part_event("done", part)]

    def _take(self, rows: list[TokenLogprob]) -> list[Any]:
        worded = chat_logprobs(rows)["content"] if rows else []
        self._logprobs += worded
        return worded

    def _with_logprobs(self, logprobs: list[Any]) -> dict[str, Any]:
        return {"logprobs": logprobs} if self.kind is _MESSAGE else {}

    def _part_event(self, what: str, part: Item) -> StreamEvent:
        return {"type": f"response.content_part.{what}", **self._at, "part": part}


class _CallItem:
    """A call, whose arguments grow."""

    def __init__(self, item: Item, index: int) -> None:
        self.item = item
        self._at = {"item_id": item["id"], "output_index": index}
        self._texts: list[str] = []

    def grow(self, text: str) -> StreamEvent:
        self._texts.append(text)
        return {"type": f"{_ARGUMENTS}.delta", **self._at, "delta": text}

    def end(self, status: Status, _: list[TokenLogprob]) -> list[StreamEvent]:
        arguments = "".join(self._texts)
        self.item = self.item | {"status": status, "arguments": arguments}
        name = self.item["name"]
        return [{"type": f"{_ARGUMENTS}.done", **self._at, "name": name, "arguments": arguments}]


_ARGUMENTS: Final = "response.function_call_arguments"


def _item_event(what: str, index: int, item: Item) -> StreamEvent:
    return {"type": f"response.output_item.{what}", "output_index": index, "item": item}

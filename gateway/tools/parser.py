"""One answer's text as reasoning, content and calls. Pure; what comes is told by events."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Container
from typing import Final

from pagemesh.gateway.tools.events import Arguments, CallStart, Content, Event, merged
from pagemesh.gateway.tools.grammars import deepseek, hermes, mistral, plain_json
from pagemesh.gateway.tools.pythonic import pythonic
from pagemesh.gateway.tools.reasoning import ReasoningSplit
from pagemesh.gateway.tools.scanner import Rule, Scanner

Grammar = Callable[[Scanner, Container[str]], Rule[None]]
GRAMMARS: Final[dict[str, Grammar]] = {
    "deepseek": deepseek,
    "hermes": hermes,
    "json": plain_json,
    "llama3_json": plain_json,
    "mistral": mistral,
    "pythonic": pythonic,
}


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class ToolParser:
    """Finds the calls in a text that comes in pieces of any size.

    A call starts as soon as its name and the beginning of its arguments are known, and its
    arguments follow as they come. What turns out to be no call is content; what goes wrong within
    the arguments leaves those as they are, and the rest is content. Nothing raises.
    `tools` are the names of the request's; only the first `max_calls` calls are told.
    """

    def __init__(
        self,
        name: str,
        tools: Container[str],
        *,
        max_calls: int | None = None,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._scanner = Scanner(new_id)
        self._rule = GRAMMARS[name](self._scanner, tools)
        self._max_calls = max_calls

    def feed(self, text: str) -> list[Event]:
        self._scanner.add(text)
        return self._read()

    def finish(self) -> list[Event]:
        """What was held back, now that no more text comes."""
        self._scanner.end()
        return merged([*self._read(), *self._scanner.close()])

    def _read(self) -> list[Event]:
        next(self._rule, None)
        events = merged(self._scanner.pop_events())
        if self._max_calls is None:
            return events
        return [event for event in events if _call_number(event) < self._max_calls]


def _call_number(event: Event) -> int:
    return event.number if isinstance(event, CallStart | Arguments) else -1


class AnswerParser:
    """Reasoning first, then calls in what is content. Either may be missing."""

    def __init__(self, reasoning: ReasoningSplit | None, tools: ToolParser | None) -> None:
        self.reasoning: Final = reasoning
        self._tools = tools

    def feed(self, text: str) -> list[Event]:
        if self.reasoning is None:
            return self._with_calls([Content(text)])
        return self._with_calls(self.reasoning.feed(text))

    def finish(self) -> list[Event]:
        held = [] if self.reasoning is None else self.reasoning.finish()
        events = self._with_calls(held)
        return events if self._tools is None else merged([*events, *self._tools.finish()])

    def _with_calls(self, events: list[Event]) -> list[Event]:
        if self._tools is None:
            return events
        found: list[Event] = []
        for event in events:
            found += self._tools.feed(event.text) if isinstance(event, Content) else [event]
        return found

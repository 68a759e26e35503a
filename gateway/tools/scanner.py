"""The text of one answer as a grammar reads it: character by character, in pieces of any size.

A grammar is a generator (`Rule`) that waits with a bare `yield` when it needs more text. So it is
written as if the text were there as a whole, and where the pieces were cut cannot matter.

What is read may turn out to be no call. Therefore all that was read since the last *settled* point
is held; when a rule raises Malformed, `attempt` gives it back as content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Final, TypeVar

from pagemesh.gateway.tools.events import Arguments, CallStart, Content, Event

T = TypeVar("T")
Rule = Generator[None, None, T]

MAX_CALLS: Final = 1024
_SPACE: Final = re.compile(r"\s*")


class Malformed(Exception):
    """The text is not what the rule reads. The character at fault has not been taken."""


class Scanner:
    """Owner of the text that came, and of the events that are ready.

    White space around calls belongs to their markup: it is dropped before a call, and behind the
    last one.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._events: list[Event] = []
        self._new_id = new_id
        self._text = ""
        self._at = 0
        self._ended = False
        self._held: list[str] = []
        self._space = ""
        self._n_calls = 0
        self._follows_call = False

    # -- text in ----------------------------------------------------------------------------------

    def add(self, text: str) -> None:
        self._text, self._at = self._text[self._at :] + text, 0

    def end(self) -> None:
        self._ended = True

    def peek(self) -> Rule[str]:
        """The next character, not taken; "" at the end of the text."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def take(self) -> str:
        """The character that `peek` has shown."""
        char = self._text[self._at : self._at + 1]
        self._at += len(char)
        self._held.append(char)
        return char

    def take_run(self, pattern: re.Pattern[str]) -> str:
        """As much of what is here as matches. More may come."""
        found = pattern.match(self._text, self._at)
        if found is None:
            return ""
        self._at = found.end()
        self._held.append(found[0])
        return found[0]

    def run(self, pattern: re.Pattern[str]) -> Rule[str]:
        """The longest run of characters that match, however it is cut into pieces."""
        pieces = []
        while (yield from self.peek()):
            piece = self.take_run(pattern)
            if not piece:
                break
            pieces.append(piece)
        return "".join(pieces)

    def space(self) -> Rule[str]:
        """Pass over white space; the character behind it, not taken."""
        while (char := (yield from self.peek())) and char.isspace():
            self.take_run(_SPACE)
        return char

    def literal(self, text: str) -> Rule[None]:
        """Raises Malformed for any other text."""
        for char in text:
            if (yield from self.peek()) != char:
                raise Malformed
            self.take()

    def one_of(self, texts: tuple[str, ...]) -> Rule[str]:
        """The one of `texts` that comes; none is the beginning of another."""
        found = ""
        while found not in texts:
            char = yield from self.peek()
            if not char or not any(text.startswith(found + char) for text in texts):
                raise Malformed
            found += self.take()
        return found

    def attempt(self, rule: Rule[None]) -> Rule[None]:
        """Run `rule`; what it has not settled when it fails is content."""
        try:
            yield from rule
        except Malformed:
            self.give_back()

    # -- events out -------------------------------------------------------------------------------

    @property
    def held(self) -> str:
        return "".join(self._held)

    def settle(self) -> None:
        """What was read is understood: nobody will want it back."""
        self._held.clear()

    def give_back(self) -> None:
        """What is held was ordinary text."""
        text = self.held
        self.settle()
        self.content(text)

    def content_run(self, plain: re.Pattern[str]) -> Rule[bool]:
        """Pass on the longest run that is `plain`; False if that was all the text."""
        while True:
            self.take_run(plain)
            self.give_back()
            if self._at < len(self._text):
                return True
            if self._ended:
                return False
            yield

    def content(self, text: str) -> None:
        shown = text.rstrip()
        if shown:
            self._events.append(Content(self._space + shown))
            self._space = ""
            self._follows_call = False
        self._space += text[len(shown) :]

    def start_call(self, name: str) -> None:
        if self._n_calls == MAX_CALLS:
            raise Malformed
        self.settle()
        self._space = ""
        self._events.append(CallStart(self._n_calls, self._new_id(), name))
        self._n_calls += 1
        self._follows_call = True

    def arguments(self, text: str) -> None:
        """More of the last call's arguments, which are settled by that."""
        self.settle()
        self._events.append(Arguments(self._n_calls - 1, text))

    def close(self) -> list[Event]:
        """The last events, at the end of the text."""
        self.give_back()
        space, self._space = self._space, ""
        if space and not self._follows_call:
            self._events.append(Content(space))
        return self.pop_events()

    def pop_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

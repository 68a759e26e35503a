"""What a model thinks before it answers: <think>…</think> in front of the answer's text."""

from __future__ import annotations

from typing import Final, Literal

from pagemesh.gateway.tools.events import Content, Event, Reasoning


class ReasoningSplit:
    """Parts a text that comes in pieces of any size.

    Only what opens an answer is reasoning; tags further on are text. White space next to a tag
    belongs to it. `inside`: the prompt has opened the tag already.
    """

    def __init__(self, opening: str, closing: str, *, inside: bool) -> None:
        self._opening: Final = opening
        self._closing: Final = closing
        self._place: Literal["before", "inside", "behind", "done"] = (
            "inside" if inside else "before"
        )
        self._held = ""
        self._began = False

    @property
    def inside(self) -> bool:
        """Whether reasoning goes on."""
        return self._place == "inside"

    def feed(self, text: str) -> list[Event]:
        if self._place == "done":
            return [Content(text)] if text else []
        events: list[Event] = []
        self._held += text
        if self._place == "before":
            self._open()
        if self._place == "inside":
            events += self._think()
        if self._place == "behind":
            self._held = self._held.lstrip()
            self._place = "done" if self._held else "behind"
        if self._place == "done":
            events += self._release(Content)
        return events

    def finish(self) -> list[Event]:
        """What was held back, now that no more text comes."""
        return self._release(Reasoning if self._place == "inside" else Content)

    def _open(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(self._opening):
            self._held = begun[len(self._opening) :]
            self._place = "inside"
        elif not self._opening.startswith(begun):
            self._place = "done"

    def _think(self) -> list[Event]:
        if not self._began:
            self._held = self._held.lstrip()
            self._began = bool(self._held)
        thought, closing, rest = self._held.partition(self._closing)
        if closing:
            self._place = "behind"
        else:
            sure = len(thought) - _overlap_chars(thought, self._closing)
            thought, rest = thought[:sure], thought[sure:]
        shown = thought.rstrip()
        self._held = rest if closing else thought[len(shown) :] + rest
        return [Reasoning(shown)] if shown else []

    def _release(self, kind: type[Content] | type[Reasoning]) -> list[Event]:
        text, self._held = self._held, ""
        return [kind(text)] if text else []


def _overlap_chars(text: str, mark: str) -> int:
    """Length of the longest tail of `text` that begins `mark`."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0

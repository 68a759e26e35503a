"""What a model thinks before it answers: <think>…</think> in front of the answer's text."""

from __future__ import annotations

from typing import Final, Literal

from pagemesh.gateway.tools.events import Content, Event, Reasoning
from pagemesh.shared.messages import Delta
from pagemesh.shared.wire import unpack_ids


class ReasoningTokens:
    """Counts the tokens of one answer up to the end of its reasoning, tags included.

    Where one token ends it, the count is exact. Otherwise a piece of text in which it ends counts
    by the share of its characters that are in front of the end.
    """

    def __init__(self, end_id: int | None) -> None:
        self.count = 0
        self._end_id = end_id
        self._n_tokens = 0
        self._ended = False

    def add(self, gain: Delta, split: ReasoningSplit) -> None:
        """`split` has been fed the text of `gain`."""
        if not self._ended:
            self._n_tokens += self._n_in_front(gain, split)
            self.count = self._n_tokens if split.was_inside else 0

    def _n_in_front(self, gain: Delta, split: ReasoningSplit) -> int:
        ids = unpack_ids(gain.token_ids)
        if self._end_id in ids:
            self._ended = True
            return ids.index(self._end_id) + 1
        if split.n_behind_chars is None or self._end_id is not None:
            return len(ids)
        self._ended = True
        share = split.n_behind_chars / len(gain.text)
        return round(len(ids) * (1 - share))


class ReasoningSplit:
    """Parts a text that comes in pieces of any size.

    Only what opens an answer is reasoning; tags further on are text. White space next to a tag
    belongs to it. `inside`: the prompt has opened the tag already. `n_behind_chars` is what stood
    behind the reasoning in the piece in which it ended.
    """

    def __init__(self, opening: str, closing: str, *, inside: bool) -> None:
        self._opening: Final = opening
        self._closing: Final = closing
        self._place: Literal["before", "inside", "behind", "done"] = (
            "inside" if inside else "before"
        )
        self.was_inside = inside
        self.n_behind_chars: int | None = None
        self._held = ""
        self._began = False

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
            self._place, self.was_inside = "inside", True
        elif not self._opening.startswith(begun):
            self._place = "done"

    def _think(self) -> list[Event]:
        if not self._began:
            self._held = self._held.lstrip()
            self._began = bool(self._held)
        thought, closing, rest = self._held.partition(self._closing)
        if closing:
            self._place, self.n_behind_chars = "behind", len(rest)
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

"""Stop strings over a stream of text that arrives in any chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pagemesh.tokenizer_svc.vocabulary import Vocabulary


class StopFilter:
    """Passes text through, up to the first stop string.

    Only a tail that is a proper prefix of some stop string is held back. The match that ends first
    wins, and of those the longest, so the outcome does not depend on the chunks.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._beginnings = tuple({stop[:n] for stop in self._stops for n in range(1, len(stop))})
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that may be shown now. After a match, everything further is dropped."""
        if self.matched is not None or not self._stops:
            return "" if self.matched is not None else text
        window = self._held + text
        if not window.endswith(self._beginnings) and not any(map(window.__contains__, self._stops)):
            self._held = ""
            return window  # as almost always
        starts = ((window.find(stop), stop) for stop in self._stops)
        found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        if not found:
            safe = len(window) - self._prefix_chars(window)
            self._held = window[safe:]
            return window[:safe]
        end, start, self.matched = min(found)
        self._held = ""
        return window[: end if self._include_stop else start]

    def flush(self) -> str:
        """What was held back, now that the stream has ended without a match."""
        held, self._held = self._held, ""
        return held

    def _prefix_chars(self, window: str) -> int:
        """Length of the longest tail of `window` that begins some stop string."""
        return max(_overlap_chars(window, stop) for stop in self._stops)


class StopEnds(dict[int, bool]):
    """By token id, whether some stop string may end in the token's text, as far as the token alone
    tells: it may wherever that does not stand for whole characters. Looked up for every token, so
    made once for each."""

    def __init__(
        self, stops: Iterable[str], vocabulary: Vocabulary, *, skip_special_tokens: bool
    ) -> None:
        super().__init__()
        self._last_chars = frozenset(stop[-1] for stop in stops)
        self._is_byte_level = vocabulary.is_byte_level
        hidden = vocabulary.hidden(skip_special_tokens=skip_special_tokens)
        self._whole_texts = vocabulary.whole_texts(hidden)

    def __missing__(self, token_id: int) -> bool:
        text = self._whole_texts[token_id] if self._is_byte_level else None
        self[token_id] = may = text is None or not self._last_chars.isdisjoint(text)
        return may


def _overlap_chars(window: str, stop: str) -> int:
    for size in range(min(len(window), len(stop) - 1), 0, -1):
        if window.endswith(stop[:size]):
            return size
    return 0

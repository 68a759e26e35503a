"""Incremental decoding: ids in one at a time, text out, never taken back.

The pieces joined equal the reference decoding of all ids, byte for byte. What a later id may still
change (the tail of a character) is held back.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Protocol

from pagemesh.tokenizer_svc.vocabulary import Vocabulary

_Utf8 = getincrementaldecoder("utf-8")


class TextDecoder(Protocol):
    """State of one stream."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this id."""

    def push_many(self, token_ids: Sequence[int]) -> str:
        """What pushing each of them would give, joined."""

    def flush(self) -> str:
        """What was held back, now that no more ids come. U+FFFD stands for half a character."""


class NoText:
    """For whoever wants token ids only."""

    def push(self, token_id: int) -> str:
        return ""

    def push_many(self, token_ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


def incremental_decoder(vocabulary: Vocabulary, hidden: frozenset[int]) -> TextDecoder:
    """`hidden` ids are no part of the text."""
    if vocabulary.is_byte_level:
        return ByteStreamDecoder(vocabulary, hidden)
    return WindowDecoder(vocabulary, hidden)


class ByteStreamDecoder:
    """For byte-level vocabularies, where a text is the concatenation of the tokens' bytes.

    Most tokens are whole characters, whose texts are known; the others go through a UTF-8 decoder.
    """

    def __init__(self, vocabulary: Vocabulary, hidden: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._whole_texts = vocabulary.whole_texts(hidden)
        self._utf8 = _Utf8("replace")
        self._holds_half = False

    def push(self, token_id: int) -> str:
        text = self._whole_texts[token_id]
        return text if text is not None and not self._holds_half else self._push_bytes(token_id)

    def push_many(self, token_ids: Sequence[int]) -> str:
        found = map(self._whole_texts.__getitem__, token_ids)
        texts = [text for text in found if text is not None]
        if self._holds_half or len(texts) < len(token_ids):
            return "".join(map(self.push, token_ids))
        return "".join(texts)

    def _push_bytes(self, token_id: int) -> str:
        if self._whole_texts[token_id] == "":
            return ""
        text = self._utf8.decode(self._vocabulary.byte_level_piece(token_id))
        self._holds_half = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        self._holds_half = False
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """For every other vocabulary: decode a short window and emit what it gained.

    The window begins with the tokens of the last emission, so that rules about the first token of
    a text (such as the dropped leading space) hit those and not the new ones. A run of byte tokens
    is held until it ends: the reference decodes it as a whole, or not at all when one byte is bad.
    """

    def __init__(self, vocabulary: Vocabulary, hidden: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._hidden = hidden
        self._context: list[int] = []
        self._context_text = ""
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        if self._is_silent(token_id):
            return ""
        self._held.append(token_id)
        return "" if self._is_open(token_id) else self.flush()

    def push_many(self, token_ids: Sequence[int]) -> str:
        """In one window, up to what the last ids leave open."""
        held = self._held + [i for i in token_ids if not self._is_silent(i)]
        n_open = 0
        while n_open < len(held) and self._is_open(held[-1 - n_open]):
            n_open += 1
        self._held = held[: len(held) - n_open]
        text = self.flush()
        self._held = held[len(held) - n_open :]
        return text

    def flush(self) -> str:
        if not self._held:
            return ""
        window = self._vocabulary.decode(self._context + self._held, skip_special_tokens=False)
        gained = window[len(self._context_text) :]
        self._context, self._held = self._held, []
        self._context_text = self._vocabulary.decode(self._context, skip_special_tokens=False)
        return gained

    def _is_silent(self, token_id: int) -> bool:
        if token_id in self._hidden:
            return True
        return self._vocabulary.token(token_id) is None

    def _is_open(self, token_id: int) -> bool:
        """Whether the next id may still change how this one decodes."""
        if self._vocabulary.is_byte_token(token_id):
            return True
        return "\ufffd" in self._vocabulary.token_str(token_id)

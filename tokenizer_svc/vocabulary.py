"""What each token id stands for: its raw bytes, its text, and the reference decoding."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

_WORD_MARK: Final = "▁"
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level BPE (Radford et al. 2019, GPT-2)."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    alphabet = {chr(byte): byte for byte in kept}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(moved)})
    return alphabet


_ALPHABET: Final = _byte_level_alphabet()


class _TokenizerFile(msgspec.Struct):
    decoder: dict[str, Any] | None = None
    normalizer: dict[str, Any] | None = None


def _decoder_types(decoder: dict[str, Any] | None) -> list[str]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [kind for part in decoder["decoders"] for kind in _decoder_types(part)]
    return [decoder["type"]]


class WholeTexts(dict[int, str | None]):
    """The text of each byte-level id that stands for whole characters, None for the others. Looked
    up for every token, so made once for each id, when it is first asked for."""

    def __init__(self, vocabulary: Vocabulary, hidden: Container[int]) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self._hidden = hidden

    def __missing__(self, token_id: int) -> str | None:
        text: str | None
        if token_id in self._hidden:
            text = ""
        else:
            text = _text_or_none(self._vocabulary.byte_level_piece(token_id))
        self[token_id] = text
        return text


def _text_or_none(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


class Vocabulary:
    """Ids of one tokenizer.json. Threads may share it: after construction it only remembers."""

    def __init__(self, tokenizer_json: bytes) -> None:
        self.tokenizer: Tokenizer = Tokenizer.from_buffer(tokenizer_json)
        file = msgspec.json.decode(tokenizer_json, type=_TokenizerFile)
        types = _decoder_types(file.decoder)
        added = self.tokenizer.get_added_tokens_decoder()
        self.is_byte_level: Final = types == ["ByteLevel"]
        self._pieces: dict[int, bytes] = {}
        self._shown: dict[int, tuple[int, str, bytes]] = {}
        self._whole_texts: dict[frozenset[int], WholeTexts] = {}
        self._uses_alphabet = "ByteLevel" in types
        self._uses_byte_tokens = "ByteFallback" in types
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special = frozenset(i for i, token in added.items() if token.special)
        # Only here does every byte of a text that has a token end up in one.
        keeps_bytes = self.is_byte_level and file.normalizer is None
        keeps_bytes &= not any(token.lstrip or token.rstrip for token in added.values())
        self._longest_bytes = self._longest_token_bytes() if keeps_bytes else None
        self._absent_bytes = self._bytes_without_token() if keeps_bytes else b""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The reference decoding of a whole sequence. Ids without a token decode to nothing."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def min_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at least; 0 where the vocabulary sets no bound."""
        if self._longest_bytes is None:
            return 0
        kept = text.encode(errors="surrogatepass").translate(None, self._absent_bytes)
        return len(kept) // self._longest_bytes

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def token(self, token_id: int) -> str | None:
        """The entry as the vocabulary spells it, None where the model has a row and no token."""
        spelled: str | None = self.tokenizer.id_to_token(token_id)
        return spelled

    def byte_level_piece(self, token_id: int) -> bytes:
        """What the id adds to the bytes that the byte-level reference decodes."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = _alphabet_bytes(self.token(token_id) or "")
        return piece

    def hidden(self, *, skip_special_tokens: bool, kept: Iterable[str] = ()) -> frozenset[int]:
        """The ids that a decoder leaves out: special ones, but for those of the tokens `kept`."""
        if not skip_special_tokens:
            return frozenset()
        return self._special.difference(map(self.tokenizer.token_to_id, kept))

    def whole_texts(self, hidden: frozenset[int]) -> WholeTexts:
        """Of a byte-level vocabulary, less the `hidden` ids. All streams share one."""
        texts = self._whole_texts.get(hidden)
        return texts or self._whole_texts.setdefault(hidden, WholeTexts(self, hidden))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes the token adds to a text, its leading space included; b"" without a token."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self.token(token_id)
        if token is None:
            return b""
        if self._uses_alphabet:
            return self.byte_level_piece(token_id)
        if self.is_byte_token(token_id):
            return bytes.fromhex(token[3:5])
        return token.replace(_WORD_MARK, " ").encode()

    def token_str(self, token_id: int) -> str:
        """`token_bytes` as text; bytes that are no whole character show as U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def shown(self, token_id: int) -> tuple[int, str, bytes]:
        """The id, its `token_str` and its `token_bytes`; remembered, as logprobs ask often."""
        shown = self._shown.get(token_id)
        if shown is None:
            shown = (token_id, self.token_str(token_id), self.token_bytes(token_id))
            self._shown[token_id] = shown
        return shown

    def _longest_token_bytes(self) -> int:
        """A byte-level entry has one character for each byte; added tokens are plain text."""
        plain = max(map(len, self.tokenizer.get_vocab(with_added_tokens=False)), default=1)
        added = (len(content.encode()) for content in self._added.values())
        return max(plain, *added, 1)

    def _bytes_without_token(self) -> bytes:
        """Encoding drops them: rare bytes that the training texts did not hold."""
        token_to_id = self.tokenizer.token_to_id
        return bytes(byte for char, byte in _ALPHABET.items() if token_to_id(char) is None)

    def is_byte_token(self, token_id: int) -> bool:
        """Whether this is a byte-fallback token, one byte of a character outside the vocabulary."""
        if not self._uses_byte_tokens:
            return False
        token = self.token(token_id)
        return token is not None and _BYTE_TOKEN.fullmatch(token) is not None


def _alphabet_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; a token with a foreign character stands for its own UTF-8."""
    try:
        return bytes(map(_ALPHABET.__getitem__, token))
    except KeyError:
        return token.encode()

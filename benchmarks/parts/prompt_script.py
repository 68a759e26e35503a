"""Answers that anybody can check: a token is a function of the prompt and its place."""

from __future__ import annotations

import zlib
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from parts.script import script_of

# Plain ASCII: no token of it is half a character.
TEXT_FILE: Final = Path(__file__).resolve().parents[2] / "LICENSE"
_WIRE_INT: Final = np.dtype("<i4")


class PromptScript:
    """A text in a model's real vocabulary, read from a place that the prompt decides."""

    def __init__(self, tokenizer_json: Path) -> None:
        self._tokenizer_json = tokenizer_json
        self.ids: NDArray[np.int32] = script_of(TEXT_FILE.read_text(), tokenizer_json)

    def start(self, prompt_ids: NDArray[np.int32]) -> int:
        """Where the answer to int32[N] begins in `ids`."""
        return zlib.crc32(prompt_ids.astype(_WIRE_INT).tobytes()) % len(self.ids)

    def tokens(self, start: int, n: int) -> NDArray[np.int32]:
        """The first `n` tokens of an answer, int32[N]."""
        return self.ids[(start + np.arange(n)) % len(self.ids)]

    def text(self, prompt_ids: NDArray[np.int32], n_tokens: int) -> str:
        """What a client must read."""
        return self._tokenizer.decode(self.tokens(self.start(prompt_ids), n_tokens).tolist())

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self._tokenizer_json))

"""Ids that nobody can guess."""

from __future__ import annotations

import os
from typing import Final

_ID_BYTES: Final = 16
_DRAWN_IDS: Final = 256


class RandomIds:
    """Calling it returns `prefix` and 32 random hexadecimal digits. The system is asked for the
    randomness of many ids at once."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._ids: list[str] = []

    def __call__(self) -> str:
        if not self._ids:
            self._ids = self._drawn()
        return self._ids.pop()

    def _drawn(self) -> list[str]:
        digits, width = os.urandom(_ID_BYTES * _DRAWN_IDS).hex(), 2 * _ID_BYTES
        return [self._prefix + digits[i : i + width] for i in range(0, len(digits), width)]

"""Names that grow with time, so that a sorted folder is in order of creation."""

from __future__ import annotations

import os
import re
from typing import Final

_TIME_HEX: Final = 11
_RANDOM_BYTES: Final = 7


def new_name(prefix: str, now_s: float) -> str:
    """Milliseconds, then chance: `prefix` and 25 hexadecimal digits."""
    return f"{prefix}{int(now_s * 1000):0{_TIME_HEX}x}{os.urandom(_RANDOM_BYTES).hex()}"


def is_name(prefix: str, name: str) -> bool:
    """Nothing else may become a part of a path."""
    n_digits = _TIME_HEX + 2 * _RANDOM_BYTES
    return re.fullmatch(rf"{prefix}[0-9a-f]{{{n_digits}}}", name) is not None

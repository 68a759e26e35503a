"""How long torch's threads wait busily for each other.

libgomp spins for milliseconds before a thread sleeps. Beside other processes that takes the cores
from those who have work (the same batch took three times as long); a short spin gives them back
and costs little where the cores are free.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

SHORT_SPIN: Final[Mapping[str, str]] = {"GOMP_SPINCOUNT": "3000"}


def limit_spinning() -> None:
    """For this process, unless its user chose otherwise. Only before torch is first imported:
    libgomp reads the variable when it is loaded."""
    for name, value in SHORT_SPIN.items():
        os.environ.setdefault(name, value)

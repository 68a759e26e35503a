"""Neighbours that keep cores busy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_BUSY_LOOP: Final = (sys.executable, "-c", "while True: pass")


@contextmanager
def busy_cores(n: int) -> Iterator[None]:
    """`n` processes that compute without end, gone when the block ends."""
    neighbours = [subprocess.Popen(_BUSY_LOOP) for _ in range(n)]
    try:
        yield
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()

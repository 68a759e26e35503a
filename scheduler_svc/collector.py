"""Keeping the garbage collector out of the steps."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# Requests come and go by reference count, and few objects are born beyond those that die. With
# CPython's own threshold a young collection still comes every few seconds, when every live request
# counts as young: 5 ms at 1000 of them.
YOUNG_OBJECTS: Final = 50_000


@contextmanager
def rare_collections() -> Iterator[None]:
    """Within, the process collects once it has `YOUNG_OBJECTS` more objects than before."""
    outer = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, *outer[1:])
    try:
        yield
    finally:
        gc.set_threshold(*outer)

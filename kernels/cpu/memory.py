"""Memory for kernels: zeros that are taken from the system as they are first written."""

from __future__ import annotations

import mmap
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

# Below this a huge page would be mostly empty.
_HUGE_FROM_BYTES: Final = 2**24


def zeros(elements: int, dtype: Any) -> NDArray[Any]:
    """A one-dimensional array that begins at a page, so that no vector lies in two cache lines.
    Raises MemoryError.

    Large ones ask for huge pages: a kernel that reads a model's weights crosses pages all the time.
    """
    n_bytes = elements * np.dtype(dtype).itemsize
    try:
        pages = mmap.mmap(-1, max(1, n_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot allocate {n_bytes} bytes") from error
    if n_bytes >= _HUGE_FROM_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype, elements)

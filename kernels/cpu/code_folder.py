"""Where compiled kernels are kept.

numba keeps compiled code by the file that a function stands in and does not notice when a function
it calls has changed in another file. So the folder is named after the source of all kernels.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Final


def _code_folder() -> Path | None:
    """The folder, or None where none can be written."""
    base = os.environ.get("NUMBA_CACHE_DIR")
    if base is None:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        base = os.path.join(cache, "pagemesh", "kernels")
    folder = Path(base, _digest())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


def _digest() -> str:
    digest = blake2b(digest_size=8)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


CODE_FOLDER: Final = _code_folder()


@contextmanager
def compiling_alone() -> Iterator[None]:
    """While other processes wait: those that start together compile once, and their writes to the
    folder do not cross."""
    if CODE_FOLDER is None:
        yield
        return
    with (CODE_FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

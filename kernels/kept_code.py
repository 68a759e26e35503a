"""Compiled kernels are kept on disk, for the next start and for processes that start together."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def default_folder() -> Path:
    """Of all compiled kernels of this user."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache, "pagemesh", "kernels")


def writable(folder: Path) -> Path | None:
    """The folder, made if need be, or None where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


@contextmanager
def alone_in(folder: Path | None) -> Iterator[None]:
    """While other processes wait: those that start together compile once, and their writes to the
    folder do not cross."""
    if folder is None:
        yield
        return
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

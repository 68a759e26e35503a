"""Kernels compiled beside each other before they are launched.

Triton compiles a kernel at its first launch, half a second each, one after the other. Here launches
are only *noted*: what Triton would compile is collected, and then compiled in threads. The compiler
lets go of the interpreter's lock for some three quarters of its time.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

from triton import knobs

from pagemesh.kernels.gpu.kernel import Kernel


class Note(NamedTuple):
    """A variant of a kernel: `specialization` is Triton's own description of it."""

    kernel: Any
    specialization: str

    def compile(self) -> None:
        """For the current device. Takes it from Triton's folder if it is there; the next launch
        finds it."""
        self.kernel.preload(self.specialization)


@contextmanager
def noted_launches() -> Iterator[list[Note]]:
    """Launches do nothing while the block runs, but for a note of what has not been compiled: what
    they would write stays as it is."""
    notes: dict[Note, None] = {}

    def note(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        notes[Note(fn.jit_function, compile["specialization_data"])] = None
        return True  # that it is done

    collected: list[Note] = []
    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, note
    Kernel.noting = True
    try:
        yield collected
    finally:
        Kernel.noting = False
        knobs.runtime.jit_cache_hook = before
        collected += notes


def compile_ahead(notes: list[Note], threads: int) -> None:
    """Raises what the compiler raises."""
    with ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool:
        for compiled in [pool.submit(note.compile) for note in notes]:
            compiled.result()

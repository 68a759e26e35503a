"""Kernels compiled beside each other before they are launched.

Triton compiles a kernel at its first launch, half a second each, one after the other. Here launches
are only *noted*: what Triton would compile is collected, and then compiled in threads. The compiler
lets go of the interpreter's lock for some three quarters of its time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import Lock
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
    kernels = {note.kernel for note in notes}  # hashing one reads all of its source
    with _read_in_turn(kernels), ThreadPoolExecutor(threads, "compile") as pool:
        for compiled in [pool.submit(note.compile) for note in notes]:
            compiled.result()


@contextmanager
def _read_in_turn(kernels: set[Any]) -> Iterator[None]:
    """Python's parser counts its depth for all threads together, and fails when two meet in it.
    What reads a kernel's source holds the interpreter's lock anyway."""
    lock = Lock()
    with ExitStack() as stack:
        for kernel in kernels:
            source = kernel.ASTSource
            stack.callback(setattr, kernel, "ASTSource", source)
            kernel.ASTSource = partial(_locked_source, source, lock)
        yield


def _locked_source(source: Callable[..., Any], lock: Lock, *arguments: Any) -> Any:
    made = source(*arguments)
    make_ir = made.make_ir

    def make_ir_alone(*arguments: Any) -> Any:
        with lock:
            return make_ir(*arguments)

    made.make_ir = make_ir_alone
    return made

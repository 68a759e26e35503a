"""How threads share the work of a step without locks and without counting each other.

A step is a list of phases, a phase a number of equal items. Any thread takes the next item; a phase
is over when all its items are done, whoever did them. So a thread that the system has put aside
holds up one item at most, and one that wakes late finds the work done. A step's tag stands in every
claim: a thread left over from an earlier step takes nothing.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from pagemesh.kernels.cpu.jit import inlined, kernel
from pagemesh.kernels.cpu.simd import I32, call, element_pointer

WORDS_PER_PHASE: Final = 16
"""Two int64 words are used, each in a cache line of its own: the next item and the items done, both
behind the tag."""
_DONE: Final = 8
_INDEX_BITS: Final = 32
_MOST_TAGS: Final = 2**31 - 1
_SPINS: Final = 2000
_YIELDS: Final = _SPINS + 1000
_SLEEP_US: Final = 50
_INDEX_MASK: Final = (1 << _INDEX_BITS) - 1


def phase_words(phases: int) -> NDArray[np.int64]:
    return np.zeros(phases * WORDS_PER_PHASE, np.int64)


class Steps:
    """Owner of the words of up to `most_phases` phases and of the tags of the steps."""

    def __init__(self, most_phases: int) -> None:
        self.words = phase_words(most_phases)
        self._tag = 0

    def open(self, phases: int) -> int:
        """Begin a step of `phases` phases, before any thread does: its tag."""
        self._tag = self._tag % _MOST_TAGS + 1
        open_phases(self.words, phases, self._tag)
        return self._tag


@kernel
def open_phases(words, phases, tag):
    """Before any thread begins the step `tag` (1 to 2**31 - 1, other than the last step's)."""
    for phase in range(phases):
        _set(words, phase * WORDS_PER_PHASE + _DONE, tag << _INDEX_BITS)
    for phase in range(phases):
        _set(words, phase * WORDS_PER_PHASE, tag << _INDEX_BITS)


@inlined
def claim(words, phase, tag, items):
    """The next item of a phase; -1 when none is left or the step is over."""
    place = phase * WORDS_PER_PHASE
    while True:
        word = _get(words, place)
        if word >> _INDEX_BITS != tag or word & _INDEX_MASK >= items:
            return -1
        if _swap(words, place, word, word + 1):
            return word & _INDEX_MASK


@inlined
def finish(words, phase, tag):
    """Count an item as done, unless its step is over."""
    place = phase * WORDS_PER_PHASE + _DONE
    while True:
        word = _get(words, place)
        if word >> _INDEX_BITS != tag or _swap(words, place, word, word + 1):
            return


@inlined
def wait(words, phase, tag, items):
    """Until all items of a phase are done: True. False when the step is over.

    A thread that holds the last item may have been put aside for milliseconds: so a short spin,
    then the core is offered to others, then sleep.
    """
    place, turns = phase * WORDS_PER_PHASE + _DONE, 0
    while True:
        word = _get(words, place)
        if word >> _INDEX_BITS != tag:
            return False
        if word & _INDEX_MASK >= items:
            return True
        turns += 1
        if turns < _SPINS:
            _pause()
        elif turns < _YIELDS:
            _yield()
        else:
            _sleep()


@intrinsic
def _get(typing: Any, words: Any, place: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = element_pointer(context, builder, words, args[0], args[1])
        return builder.load_atomic(pointer, "acquire", align=8)

    return types.int64(words, types.intp), generate


@intrinsic
def _set(typing: Any, words: Any, place: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = element_pointer(context, builder, words, args[0], args[1])
        builder.store_atomic(args[2], pointer, "release", align=8)
        return context.get_dummy_value()

    return types.void(words, types.intp, types.int64), generate


@intrinsic
def _swap(typing: Any, words: Any, place: Any, old: Any, new: Any) -> Any:
    """Put `new` where `old` is; whether it was."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = element_pointer(context, builder, words, args[0], args[1])
        pair = builder.cmpxchg(pointer, args[2], args[3], "acq_rel", "acquire")
        return builder.extract_value(pair, 1)

    return types.boolean(words, types.intp, types.int64, types.int64), generate


@intrinsic
def _pause(typing: Any) -> Any:
    """A moment's rest for the core, where the machine has an instruction for it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if str(builder.module.triple).startswith("x86_64"):
            call(builder, "llvm.x86.sse2.pause", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _yield(typing: Any) -> Any:
    """Let another process have the core."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call(builder, "sched_yield", I32)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _sleep(typing: Any) -> Any:
    """For about _SLEEP_US microseconds."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call(builder, "usleep", I32, I32(_SLEEP_US))
        return context.get_dummy_value()

    return types.void(), generate

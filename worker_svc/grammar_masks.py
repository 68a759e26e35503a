"""Which tokens the rules of a batch let come next, as bits: found out in threads."""

from __future__ import annotations

import os
from typing import Final

import numpy as np
from llguidance import LLExecutor
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from pagemesh.shared.grammar import Matcher

MASK_BITS: Final = 32
# More of them wake each other for longer than they work.
_MAX_THREADS: Final = 4


def mask_words(vocab_tokens: int) -> int:
    return -(-vocab_tokens // MASK_BITS)


class MaskThreads:
    """Owner of the threads that find out what the rules of a batch allow."""

    def __init__(self) -> None:
        self._threads = LLExecutor(num_threads=min(_MAX_THREADS, len(os.sched_getaffinity(0))))

    def fill(self, matchers: list[Matcher], masks: NDArray[np.int32]) -> None:
        """int32[N, ceil(V / 32)], contiguous: bit i of word w allows token 32 w + i. A matcher for
        which there is no mask is in error after that, and its row holds anything."""
        begun = []
        for row, each in enumerate(matchers):
            if each.is_free:
                masks[row] = -1
            else:
                begun.append((each.core, row))
        if len(begun) == 1:
            fill_next_token_bitmask(begun[0][0], masks, begun[0][1])
        elif begun:
            fill_next_token_bitmask_par(self._threads, begun, masks)
        for row, each in enumerate(matchers):
            if each.opened_by is not None:
                word, bit = divmod(each.opened_by, MASK_BITS)
                masks.view(np.uint32)[row, word] |= np.uint32(1 << bit)


def banned_tokens(mask: NDArray[np.int32], vocab_tokens: int) -> NDArray[np.int64]:
    """The ids that one row of masks does not allow."""
    bits = np.unpackbits(mask.view(np.uint8), count=vocab_tokens, bitorder="little")
    return np.flatnonzero(bits == 0)

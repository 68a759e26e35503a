"""Which tokens the rules of a batch let come next, as bits."""

from __future__ import annotations

import os
from typing import Final

import numpy as np
from llguidance import LLExecutor
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from pagemesh.shared.grammar import GrammarError, Matcher

MASK_BITS: Final = 32
_MAX_THREADS: Final = 8


class MaskMaker:
    """Which tokens may come next. Owner of the threads that find out."""

    def __init__(self, vocab_tokens: int) -> None:
        self._words = -(-vocab_tokens // MASK_BITS)
        self._threads = LLExecutor(num_threads=min(_MAX_THREADS, len(os.sched_getaffinity(0))))

    def masks(self, matchers: list[Matcher]) -> NDArray[np.int32]:
        """int32[N, ceil(V / 32)]: bit i of word w allows token 32 w + i.

        Raises GrammarError when one of `matchers` can go no further.
        """
        masks = np.full((len(matchers), self._words), -1, np.int32)
        begun = [(each.core, row) for row, each in enumerate(matchers) if each.has_begun]
        if len(begun) == 1:
            fill_next_token_bitmask(begun[0][0], masks, begun[0][1])
        elif begun:
            fill_next_token_bitmask_par(self._threads, begun, masks)
        for core, _ in begun:
            if core.is_error():
                raise GrammarError(core.get_error())
        return masks


def banned_tokens(mask: NDArray[np.int32], vocab_tokens: int) -> NDArray[np.int64]:
    """The ids that one row of masks does not allow."""
    bits = np.unpackbits(mask.view(np.uint8), count=vocab_tokens, bitorder="little")
    return np.flatnonzero(bits == 0)

"""Which tokens the rules of a batch let come next, as bits: found out in threads."""

from __future__ import annotations

import os
from typing import Final

import numpy as np
from llguidance import LLExecutor
from llguidance.numpy import (
    consume_token_par,
    fill_next_token_bitmask,
    fill_next_token_bitmask_par,
)
from numpy.typing import NDArray

from pagemesh.shared.grammar import Matcher

MASK_BITS: Final = 32
_MAX_THREADS: Final = 16


class RuleThreads:
    """Owner of the threads that follow the rules of a batch."""

    def __init__(self, vocab_tokens: int) -> None:
        self._words = -(-vocab_tokens // MASK_BITS)
        self._threads = LLExecutor(num_threads=min(_MAX_THREADS, len(os.sched_getaffinity(0))))

    def advance(self, matchers: list[Matcher], tokens: list[int]) -> None:
        """Each takes a token. One that must not have it is in error after that."""
        pairs = zip(matchers, tokens, strict=True)
        taking = [(each.core, token) for each, token in pairs if each.takes(token)]
        if taking:
            consume_token_par(self._threads, taking)

    def masks(self, matchers: list[Matcher]) -> NDArray[np.int32]:
        """int32[N, ceil(V / 32)]: bit i of word w allows token 32 w + i. A matcher for which there
        is no mask is in error after that."""
        masks = np.full((len(matchers), self._words), -1, np.int32)
        begun = [(each.core, row) for row, each in enumerate(matchers) if not each.is_free]
        if len(begun) == 1:
            fill_next_token_bitmask(begun[0][0], masks, begun[0][1])
        elif begun:
            fill_next_token_bitmask_par(self._threads, begun, masks)
        for row, each in enumerate(matchers):
            if each.opened_by is not None:
                word, bit = divmod(each.opened_by, MASK_BITS)
                masks.view(np.uint32)[row, word] |= np.uint32(1 << bit)
        return masks


def banned_tokens(mask: NDArray[np.int32], vocab_tokens: int) -> NDArray[np.int64]:
    """The ids that one row of masks does not allow."""
    bits = np.unpackbits(mask.view(np.uint8), count=vocab_tokens, bitorder="little")
    return np.flatnonzero(bits == 0)

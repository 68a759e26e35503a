"""Which tokens the rules of a batch let come next, as bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from pagemesh.shared.grammar import Matcher

MASK_BITS: Final = 32

Mask = NDArray[np.int32]


def mask_words(vocab_tokens: int) -> int:
    return -(-vocab_tokens // MASK_BITS)


def mask_of(token_ids: Iterable[int], vocab_tokens: int) -> Mask:
    """int32[ceil(V / 32)]: bit i of word w is set for token 32 w + i. Ids outside the vocabulary
    have no bit."""
    ids = np.array([*token_ids], np.int64)
    bits = np.zeros(mask_words(vocab_tokens) * MASK_BITS, np.bool_)
    bits[ids[(ids >= 0) & (ids < vocab_tokens)]] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def mask_of_all(vocab_tokens: int) -> Mask:
    """The mask that has a bit for each token, and for nothing behind them."""
    bits = np.zeros(mask_words(vocab_tokens) * MASK_BITS, np.bool_)
    bits[:vocab_tokens] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def fill_masks(matchers: Sequence[Matcher | None], masks: NDArray[np.int32]) -> None:
    """int32[N, ceil(V / 32)], contiguous: bit i of word w allows token 32 w + i. A matcher for
    which there is no mask is in error after that, and its row holds anything; without a matcher
    any token may come.

    A row takes 5 to 15 us. Threads for them cost more in handing over than they save.
    """
    for row, each in enumerate(matchers):
        if each is None or each.is_free:
            masks[row] = -1
        else:
            fill_next_token_bitmask(each.core, masks, row)
        if each is not None and each.opened_by is not None:
            word, bit = divmod(each.opened_by, MASK_BITS)
            masks.view(np.uint32)[row, word] |= np.uint32(1 << bit)


def banned_tokens(mask: NDArray[np.int32], vocab_tokens: int) -> NDArray[np.int64]:
    """The ids that one row of masks does not allow."""
    bits = np.unpackbits(mask.view(np.uint8), count=vocab_tokens, bitorder="little")
    return np.flatnonzero(bits == 0)

"""How rows are sampled, as kernels read it: a table int32[max_num_seqs, 16] by slot.

A row of the table is kernels.sample_rows.PARAMS word by word; floats are their bits.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from pagemesh.kernels.sample_rows import PARAMS

ROW_WORDS: Final = 16
PARAM_WORDS: Final = PARAMS.itemsize // 4
_WIDTH = tl.constexpr(ROW_WORDS)

# Columns. The seed takes two words, low and high.
SEED = tl.constexpr(0)
TOP_K = tl.constexpr(2)
COUNT_ROW = tl.constexpr(3)
INVERSE_TEMPERATURE = tl.constexpr(4)
TOP_P = tl.constexpr(5)
LOG_MIN_P = tl.constexpr(6)
REPETITION = tl.constexpr(7)
FREQUENCY = tl.constexpr(8)
PRESENCE = tl.constexpr(9)


class SamplingRows(NamedTuple):
    """A step's rows: slots int32[R] (-1: a padding row, which is left alone), and positions
    int32[R] or int64[R] that the sampled tokens will have. `params`: see above."""

    params: Tensor
    slots: Tensor
    positions: Tensor


@triton.jit
def params_of(table, slot):
    """Pointer to the parameters of a slot. (A kernel's argument cannot be called `params`: Triton's
    launcher has a variable of that name.)"""
    return table + slot * _WIDTH


@triton.jit
def load_float(own, column):
    return tl.load(own + column).to(tl.float32, bitcast=True)


@triton.jit
def is_random(own):
    """Whether the row draws; else it is greedy."""
    return load_float(own, INVERSE_TEMPERATURE) > 0


@triton.jit
def load_scale(own):
    """What the row's logits are multiplied by."""
    return tl.where(is_random(own), load_float(own, INVERSE_TEMPERATURE), 1.0)


@triton.jit
def has_filters(own):
    """Whether the row draws from fewer tokens than all."""
    narrowed = (tl.load(own + TOP_K) > 0) | (load_float(own, TOP_P) < 1.0)
    narrowed |= load_float(own, LOG_MIN_P) > -float("inf")
    return narrowed & is_random(own)

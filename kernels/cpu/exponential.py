"""e**x of vectors, in operations whose order and rounding are fixed."""

from __future__ import annotations

from typing import Final

import numpy as np

from pagemesh.kernels.cpu.jit import part
from pagemesh.kernels.cpu.simd import (
    add,
    floor,
    fma,
    larger,
    mul,
    power_of_two,
    smaller,
    splat,
    zero_below,
)

_LOG2E: Final = np.float32(1.44269504)
_LN2_HIGH: Final = np.float32(-0.693359375)
_LN2_LOW: Final = np.float32(2.12194440e-4)
_EXP_TERMS: Final = tuple(
    np.float32(term)
    for term in (
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    )
)
_EXP_LEAST: Final = np.float32(-87.0)
_EXP_MOST: Final = np.float32(88.0)
_HALF, _ONE = np.float32(0.5), np.float32(1.0)


@part
def exp(x):  # of vectors
    """e**x to about 2 ulp; 0 below -87, e**88 above 88 (Cephes' expf: x = n ln 2 + r)."""
    inside = larger(splat(_EXP_LEAST), smaller(splat(_EXP_MOST), x))  # in this order NaN stays
    n = floor(fma(inside, splat(_LOG2E), splat(_HALF)))
    r = fma(n, splat(_LN2_LOW), fma(n, splat(_LN2_HIGH), inside))
    series = splat(_EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        series = fma(series, r, splat(term))
    series = fma(mul(series, r), r, add(r, splat(_ONE)))
    return zero_below(mul(series, power_of_two(n)), x, splat(_EXP_LEAST))

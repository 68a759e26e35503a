"""The sampler's Gumbel noise (see kernels.noise, its reference) in vectors.

The integers are those of the reference. The logarithms differ from torch's by a few ulp.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pagemesh.kernels.cpu.jit import LANES, inlined
from pagemesh.kernels.cpu.sampling_lanes import binary_exponent, binary_fraction, rough_log2
from pagemesh.kernels.cpu.simd import (
    F32S,
    I32,
    I32S,
    VECTOR,
    add,
    call,
    fma,
    mul,
    repeat,
    smaller,
    splat,
    sub,
)

_SEED_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
_POSITION_STEP: Final = np.uint64(0xD1342543DE82EF95)
_TOKEN_STEP: Final = 0x9E3779B1


@inlined
def row_key(seed, position):
    """uint64 of two int64."""
    mixed = _mix64(np.uint64(seed) + _SEED_STEP)
    return _mix64(mixed ^ (np.uint64(position) * _POSITION_STEP))


@inlined
def _mix64(z):
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@intrinsic
def magnitudes(typing: Any, key: Any, first: Any) -> Any:
    """|b + 1/2| of the 32 signed bits b that the tokens first, first + 1 … have under a row's key:
    uniform in (0, 2**31), and the smallest make the largest noise."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        low = builder.trunc(args[0], I32)
        high = builder.trunc(builder.lshr(args[0], args[0].type(32)), I32)
        start = builder.add(builder.mul(builder.trunc(args[1], I32), _integer(_TOKEN_STEP)), low)
        steps = [_integer(lane * _TOKEN_STEP).constant for lane in range(LANES)]
        bits = builder.add(_copies(builder, start), ir.Constant(I32S, steps))
        bits = _xor_shifted(builder, bits, 16)
        bits = builder.mul(bits, repeat(I32S, _integer(0x7FEB352D).constant))
        bits = builder.xor(bits, _copies(builder, high))
        bits = _xor_shifted(builder, bits, 15)
        bits = builder.mul(bits, repeat(I32S, _integer(0x846CA68B).constant))
        number = builder.sitofp(_xor_shifted(builder, bits, 16), F32S)
        number = builder.fadd(number, repeat(F32S, 0.5))
        return call(builder, f"llvm.fabs.v{LANES}f32", F32S, number)

    return VECTOR(types.uint64, types.intp), generate


def _integer(value: int) -> Any:
    """A constant of the low 32 bits."""
    low = value & 0xFFFFFFFF
    return I32(low - (1 << 32) if low >= 1 << 31 else low)


def _copies(builder: Any, scalar: Any) -> Any:
    undefined = ir.Constant(I32S, ir.Undefined)
    first = builder.insert_element(undefined, scalar, I32(0))
    return builder.shuffle_vector(first, undefined, repeat(I32S, 0))


def _xor_shifted(builder: Any, bits: Any, n: int) -> Any:
    return builder.xor(bits, builder.lshr(bits, repeat(I32S, n)))


_ZERO, _HALF, _ONE = np.float32(0.0), np.float32(0.5), np.float32(1.0)
_TO_ONE: Final = np.float32(2.0**-31)
_BELOW_ONE: Final = np.float32(1.0 - 2.0**-24)
MOST_NOISE: Final = np.float32(22.19)
"""Above the largest noise there is, 32 ln 2 = 22.181."""


@inlined
def gumbel(magnitude):
    """-log(-log1p(-v)), v = magnitude / 2**31. What 1 - v loses in rounding is added to its
    logarithm."""
    v = smaller(mul(magnitude, splat(_TO_ONE)), splat(_BELOW_ONE))
    rest = sub(splat(_ONE), v)
    lost = sub(v, sub(splat(_ONE), rest))
    return sub(splat(_ZERO), log(sub(lost, log(rest))))


_LN2: Final = np.float32(0.6931472)
_BOUND_AT_ONE: Final = np.float32(31 * 0.6931472 + 0.001)


@inlined
def gumbel_bound(magnitude):
    """Not below the noise, at most 0.06 above -log v, which is not below it either."""
    return fma(rough_log2(magnitude), splat(-_LN2), splat(_BOUND_AT_ONE))


_LN2_HIGH: Final = np.float32(0.693359375)
_LN2_LOW: Final = np.float32(-2.12194440e-4)
_LOG_TERMS: Final = tuple(
    np.float32(term)
    for term in (
        7.0376836292e-2,
        -1.1514610310e-1,
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    )
)


@inlined
def log(x):
    """Of positive, normal lanes, to about 1 ulp (Cephes' logf: x = (1 + f) 2**e)."""
    e, f = binary_exponent(x), sub(binary_fraction(x), splat(_ONE))
    square = mul(f, f)
    series = splat(_LOG_TERMS[0])
    for term in _LOG_TERMS[1:]:
        series = fma(series, f, splat(term))
    tail = fma(e, splat(_LN2_LOW), mul(mul(f, square), series))
    tail = fma(square, splat(-_HALF), tail)
    return fma(e, splat(_LN2_HIGH), add(f, tail))

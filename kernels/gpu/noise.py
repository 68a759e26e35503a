"""kernels.noise on the card: the same bits, and Gumbel noise of them.

Functions for other kernels to call; none is launched by itself.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_key(seed_low, seed_high, position):
    """uint64 key of a seed in two int32 words and an integer position."""
    seed = (_widened(seed_high) << 32) | _widened(seed_low)
    mixed = _mix64(seed + 0x9E3779B97F4A7C15)
    return _mix64(mixed ^ (position.to(tl.int64).to(tl.uint64, bitcast=True) * 0xD1342543DE82EF95))


@triton.jit
def token_bits(key, token_ids):
    """int32 uniform bits of a uint64 key and int32 token ids, a tensor or a scalar of them."""
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    bits = token_ids.to(tl.uint32, bitcast=True) * 0x9E3779B1 + low
    bits ^= bits >> 16
    bits *= 0x7FEB352D
    bits = bits ^ (bits >> 15) ^ (high ^ (high >> 15))  # as bits ^= high, bits ^= bits >> 15
    bits *= 0x846CA68B
    bits ^= bits >> 16
    return bits.to(tl.int32, bitcast=True)


@triton.jit
def gumbel_of_bits(bits):
    """float32 Gumbel noise, see kernels.noise.gumbel_of_bits.

    log1p is Kahan's: the rounding of 1 - uniform is undone by the ratio of the differences.
    """
    uniform = tl.minimum(_size(bits) * 4.656612873077393e-10, 0.9999999403953552)
    rest = 1.0 - uniform
    # Where nothing is left of `uniform`, log1p(-uniform) is -uniform.
    lost = tl.where(rest == 1.0, 1.0, 1.0 - rest)
    exponential = tl.where(rest == 1.0, uniform, -tl.log(rest) * (uniform / lost))
    return -tl.log(exponential)


@triton.jit
def gumbel_bound(bits):
    """No less than gumbel_of_bits, and where that is large at most 0.06 above; no logarithm.

    -log(-log1p(-v)) <= -log(v), and the bits of a float are its binary logarithm, linear between
    powers of two and so never above it. The margin covers all rounding.
    """
    linear = _size(bits).to(tl.int32, bitcast=True).to(tl.float32)
    return 109.5173 - linear * 8.262958e-08  # (31 + 127) log(2) + 1e-4, and log(2) / 2**23


@triton.jit
def _size(bits):
    """2**31 times the uniform of the bits, in (0, 2**31], finest near zero."""
    return tl.abs(bits.to(tl.float32) + 0.5)


@triton.jit
def _widened(word):
    return word.to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def _mix64(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)

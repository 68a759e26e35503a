"""Gumbel noise as a pure function of (seed, absolute position, token id).

A row's 64-bit key is a strong mix of its seed and position; a token's 32 bits are a cheap mix of
the key and the token id. All of it is wrapping integer arithmetic, so another implementation can
repeat the bits exactly, and no row depends on which rows or tokens are computed beside it.

Mixers: Stafford's variant 13 of the MurmurHash3 finaliser (64 bits, as in SplitMix64) and Wellons'
lowbias32 (32 bits).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_SEED_STEP: Final = 0x9E3779B97F4A7C15
_POSITION_STEP: Final = 0xD1342543DE82EF95
_TOKEN_STEP: Final = 0x9E3779B1
_BELOW_ONE: Final = 1.0 - 2.0**-24


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """int64[R] keys of int64[R] seeds and int64[R] absolute positions."""
    mixed = _mix64(seeds + _signed(_SEED_STEP, 64))
    return _mix64(mixed ^ (positions * _signed(_POSITION_STEP, 64)))


def token_bits(keys: Tensor, token_ids: Tensor) -> Tensor:
    """int32[R, K] uniform bits for int64[R] keys and token ids int32[K] or int32[R, K]."""
    low = _low_half(keys).unsqueeze(1)
    high = _low_half(keys >> 32).unsqueeze(1)
    bits = token_ids * _signed(_TOKEN_STEP, 32) + low
    _xor_shift_(bits, 16).mul_(0x7FEB352D).bitwise_xor_(high)
    _xor_shift_(bits, 15).mul_(_signed(0x846CA68B, 32))
    return _xor_shift_(bits, 16)


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """float32[R, K] standard Gumbel noise for int64[R] keys and token ids int32[K] or [R, K]."""
    return gumbel_of_bits(token_bits(keys, token_ids))


def gumbel_of_bits(bits: Tensor) -> Tensor:
    """-log(-log1p(-v)) as float32, with v in (0, 1) uniform if int32 `bits` are.

    Small v makes the large values that win, and |float(bits)| is finest near zero, so the upper
    tail is resolved to 2**-32.
    """
    uniform = bits.to(torch.float32)
    uniform.add_(0.5).abs_().mul_(2.0**-31).clamp_(max=_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix64(z: Tensor) -> Tensor:
    z = (z ^ _shift_right(z, 30)) * _signed(0xBF58476D1CE4E5B9, 64)
    z = (z ^ _shift_right(z, 27)) * _signed(0x94D049BB133111EB, 64)
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift of int64; torch's own is arithmetic."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _xor_shift_(x: Tensor, bits: int) -> Tensor:
    """x ^= x >>> bits on int32, in place."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def _low_half(z: Tensor) -> Tensor:
    """The low 32 bits of int64 values, as int32."""
    return (((z & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32)


def _signed(value: int, bits: int) -> int:
    """The two's complement reading of an unsigned constant."""
    return value - (1 << bits) if value >> (bits - 1) else value

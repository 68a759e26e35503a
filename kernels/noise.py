"""Gumbel noise as a pure function of (seed, absolute position, token id).

A row's 64-bit key is a strong mix of its seed and position; a token's 32 bits are a cheap mix of
the key and the token id. All of it is wrapping unsigned arithmetic, so another implementation can
repeat the bits exactly, and no row depends on which rows or tokens are computed beside it.

Mixers: Stafford's variant 13 of the MurmurHash3 finaliser (64 bits, as in SplitMix64) and Wellons'
lowbias32 (32 bits). They run in numpy, which has unsigned integers with a logical shift.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_SEED_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
_POSITION_STEP: Final = np.uint64(0xD1342543DE82EF95)
_TOKEN_STEP: Final = np.uint32(0x9E3779B1)
_BELOW_ONE: Final = 1.0 - 2.0**-24


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """int64[R] keys of int64[R] seeds and int64[R] absolute positions."""
    seed, position = (part.numpy(force=True).view(np.uint64) for part in (seeds, positions))
    keys = _mix64(_mix64(seed + _SEED_STEP) ^ (position * _POSITION_STEP))
    return torch.from_numpy(keys.view(np.int64)).to(seeds.device)


def token_bits(keys: Tensor, token_ids: Tensor) -> Tensor:
    """int32 uniform bits for int64 keys and int32 token ids, which broadcast against each other."""
    key = keys.numpy(force=True).view(np.uint64)
    low, high = key.astype(np.uint32), (key >> np.uint64(32)).astype(np.uint32)
    bits = token_ids.numpy(force=True).view(np.uint32) * _TOKEN_STEP + low
    bits ^= bits >> np.uint32(16)
    bits *= np.uint32(0x7FEB352D)
    bits ^= high
    bits ^= bits >> np.uint32(15)
    bits *= np.uint32(0x846CA68B)
    bits ^= bits >> np.uint32(16)
    return torch.from_numpy(bits.view(np.int32)).to(keys.device)


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """float32 standard Gumbel noise; int64 keys and int32 token ids broadcast."""
    return gumbel_of_bits(token_bits(keys, token_ids))


def gumbel_of_bits(bits: Tensor) -> Tensor:
    """-log(-log1p(-v)) as float32, with v in (0, 1) uniform if int32 `bits` are.

    Small v makes the large values that win, and |float(bits)| is finest near zero, so the upper
    tail is resolved to 2**-32.
    """
    uniform = bits.to(torch.float32)
    uniform.add_(0.5).abs_().mul_(2.0**-31).clamp_(max=_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix64(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))

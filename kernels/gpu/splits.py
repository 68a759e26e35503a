"""Reading what a linear layer left, in K-splits or whole (see kernels/linear.py)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def split_shape(x: Tensor) -> tuple[int, int]:
    """(S, elements from one split to the next) of x [T, N] or K-splits [S, T, N]."""
    return (x.shape[0], x.stride(0)) if x.ndim == 3 else (1, 0)


@triton.jit
def load_joined(x, at, mask, split_stride, SPLITS: tl.constexpr):
    """The float32 sum of the splits of elements `at`, not yet rounded; zero outside `mask`."""
    total = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    for _ in tl.static_range(SPLITS - 1):
        x += split_stride
        total += tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def rounded(x, dtype):
    """Float32 x as `dtype` would hold it."""
    return x.to(dtype).to(tl.float32)

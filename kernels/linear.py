"""What a linear layer returns when its sum over input features is split.

With few rows, a matrix product keeps a GPU busy only if several programs share a column of the
weights, each taking a part of the input features ("K-splits"). They leave their float32 partial
sums side by side, and whoever reads the result next adds them up.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor


def join_splits(x: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """x [T, N], or K-splits float32[S, T, N], as an unsplit linear layer would return it.

    Adds the splits in order in float32, then `bias` [N], and rounds once; returns [T, N] in
    `dtype`.
    """
    total = x.float() if x.ndim == 2 else reduce(torch.add, x)
    return (total if bias is None else total + bias.float()).to(dtype)

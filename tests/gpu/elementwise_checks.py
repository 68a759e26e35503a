"""What the tests of kernels that join, round and scale rows share."""

from __future__ import annotations

import torch
from torch import Tensor

ON_CARD = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16, *[torch.bfloat16] * ON_CARD]
"""The interpreter rounds to float16 as a card does, but not to bfloat16."""
SPLITS = [1, 2, 4]


def linear_output(rows: int, columns: int, splits: int, dtype: torch.dtype, device: str) -> Tensor:
    """What a linear layer leaves: [rows, columns] whole, or float32 K-splits of it."""
    if splits == 1:
        return torch.randn(rows, columns, device=device).to(dtype)
    return torch.randn(splits, rows, columns, device=device)


def tokens_of(x: Tensor, chosen: slice) -> Tensor:
    """A copy of rows of what linear_output made."""
    return x[..., chosen, :].clone(memory_format=torch.contiguous_format)


def assert_rounded_alike(got: Tensor, expected: Tensor) -> None:
    """Equal but for the order of a reduction, which a rounding may magnify here and there."""
    assert got.dtype is expected.dtype
    eps = torch.finfo(got.dtype).eps
    tolerance = (16 if got.dtype is torch.float32 else 4) * eps
    scale = expected.abs().max().item() if expected.numel() else 1.0
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * scale)
    if got.dtype is not torch.float32:
        assert (got == expected).float().mean() > 0.97

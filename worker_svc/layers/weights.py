"""How a layer says which checkpoint tensors it wants, and where they go.

A layer yields `(checkpoint name, view of its parameter)`. A loader copies each tensor into its
view, so fused layers need no second copy and the checkpoint's dtype may differ from the model's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

WeightViews = Iterator[tuple[str, Tensor]]


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """A weight for inference, not yet filled."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)

"""Tensors as Hopper's tensor memory accelerator sees them, box by box."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

GLUON_TYPES: Final = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


class Boxes(TensorDescriptor):  # type: ignore[misc]
    """A TensorDescriptor whose maker has checked what it is made of: a base and strides (but the
    last, which is 1) that are multiples of 16 bytes. The checks take longer than a launch."""

    def __post_init__(self) -> None:
        """Nothing."""


def boxes(
    base: Tensor, shape: Sequence[int], strides: Sequence[int], box: tuple[int, ...]
) -> Boxes:
    """`base` as a tensor of `shape` and `strides`, in elements of 16 bits."""
    return Boxes(base, [*shape], [*strides], [*box], _memory(box, base.dtype))


@cache
def _memory(box: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([*box], GLUON_TYPES[dtype])

"""What every kernel launch needs to know of the card."""

from __future__ import annotations

from functools import cache

import torch
from triton import knobs


@cache
def pdl() -> bool:
    """Whether kernels overlap their start with the end of the one before (programmatic dependent
    launch, compute capability 9.0 and newer)."""
    if knobs.runtime.interpret or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability()[0] >= 9


@cache
def multiprocessors() -> int:
    """Of the current device; 1 in the interpreter."""
    if knobs.runtime.interpret or not torch.cuda.is_available():
        return 1
    return torch.cuda.get_device_properties().multi_processor_count

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


# Triton's own of these two take ten microseconds on the host, which every launch would pay.


def cdiv(n: int, by: int) -> int:
    """n / by, rounded up."""
    return -(-n // by)


def next_power_of_2(n: int) -> int:
    """The smallest that is at least n >= 1."""
    return 1 << (n - 1).bit_length()

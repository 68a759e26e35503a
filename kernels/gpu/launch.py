"""What every kernel launch needs to know of the card.

`TRIGGER` says where a kernel lets the next one start, which then waits for its end: 0 at once, so
that the next is in place and has its weights; 1 once the kernel in front has finished; 2 when its
own loads are done, so that it shares nothing of the multiprocessor before.
"""

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

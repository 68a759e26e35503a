"""A device that will compute nothing more in this process."""

from __future__ import annotations

from typing import Final

from pagemesh.shared.errors import PagemeshError
from pagemesh.worker_svc.memory import is_out_of_memory

# How CUDA's runtime and libraries, and Triton's launcher, begin the text of a failed call.
_FAILED_CALLS: Final = ("CUDA error", "Triton Error [CUDA]")


class DeviceLost(PagemeshError):
    """A call to the device failed, and every later one will: such errors never heal, so the process
    must end for a new one to begin anew. `step` is the first whose result was lost."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"the device was lost in step {step}: {reason}")
        self.step = step
        self.reason = reason

    @classmethod
    def after(cls, error: BaseException, step: int) -> DeviceLost:
        lost = cls(step, str(error).split("\n", 1)[0])
        lost.__cause__ = error
        return lost


def loses_device(error: BaseException) -> bool:
    """Whether after `error` nothing more can be computed in this process. A lack of memory is over
    once some is given back."""
    text = str(error)
    failed = isinstance(error, RuntimeError) and any(call in text for call in _FAILED_CALLS)
    return failed and not is_out_of_memory(error)

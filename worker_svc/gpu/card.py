"""Which GPU this process computes on, and whether it can."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

import torch

from pagemesh.shared.errors import StartupError

_OLDEST: Final = (8, 0)


def why_not() -> str | None:
    """Why no GPU can be used here, as a sentence; None if one can."""
    if torch.version.hip is not None:
        return (
            "this PyTorch is built for ROCm, and the kernels are written for NVIDIA GPUs: "
            "install a CUDA build of PyTorch on a machine with an NVIDIA GPU, or use --device cpu"
        )
    if not torch.cuda.is_available():
        return (
            "PyTorch sees no NVIDIA GPU (it may be a CPU build, the driver may be missing or too "
            "old, or CUDA_VISIBLE_DEVICES may hide the GPUs): use --device cpu"
        )
    capability, name = torch.cuda.get_device_capability(), torch.cuda.get_device_name()
    if capability < _OLDEST:
        found = ".".join(map(str, capability))
        return (
            f"{name} has compute capability {found}, and the kernels need 8.0 (Ampere) or newer: "
            "use a newer GPU or --device cpu"
        )
    if find_spec("triton") is None:
        return "the package triton, which compiles the GPU kernels, is missing: pip install triton"
    return None


def require_card() -> torch.device:
    """The first device of CUDA_VISIBLE_DEVICES. Raises StartupError when it cannot be used."""
    reason = why_not()
    if reason is not None:
        raise StartupError(reason)
    return torch.device("cuda", torch.cuda.current_device())

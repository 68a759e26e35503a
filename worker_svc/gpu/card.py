"""Which GPU this process computes on, whether it can, and how its memory stands."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final, NamedTuple

import torch

from pagemesh.shared.errors import StartupError
from pagemesh.worker_svc.gpu.memory import Card
from pagemesh.worker_svc.gpu.tenants import co_tenants

_OLDEST: Final = (8, 0)


class Reading(NamedTuple):
    """Bytes of a device: free for anybody; allocated by this process's tensors now, and at most
    since the last reading; reserved for them. And how many allocations have failed so far."""

    free_bytes: int
    allocated_bytes: int
    peak_bytes: int
    reserved_bytes: int
    n_failed: int


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


def sees_a_gpu() -> bool:
    """Whether PyTorch sees one of any make, which may not be one that can be used."""
    return torch.cuda.is_available()


def require_card() -> torch.device:
    """The first device of CUDA_VISIBLE_DEVICES. Raises StartupError when it cannot be used."""
    reason = why_not()
    if reason is not None:
        raise StartupError(reason)
    return torch.device("cuda", torch.cuda.current_device())


def look_at(device: torch.device) -> Card:
    """The card before anything is loaded: what is in use now is others' and CUDA's own."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    properties = torch.cuda.get_device_properties(device)
    return Card(
        name=properties.name,
        total_bytes=total_bytes,
        others_bytes=total_bytes - free_bytes,
        tenants=tuple(co_tenants(str(getattr(properties, "uuid", "")))),
    )


def read_memory(device: torch.device) -> Reading:
    """Once everything launched so far is done."""
    torch.cuda.synchronize(device)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    reading = Reading(
        free_bytes=free_bytes,
        allocated_bytes=torch.cuda.memory_allocated(device),
        peak_bytes=torch.cuda.max_memory_allocated(device),
        reserved_bytes=torch.cuda.memory_reserved(device),
        n_failed=torch.cuda.memory_stats(device).get("num_ooms", 0),
    )
    torch.cuda.reset_peak_memory_stats(device)
    return reading

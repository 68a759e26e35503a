"""Who else has memory of a GPU. PyTorch knows how much is in use but not by whom; the driver's own
tool does, where it is there and sees the processes."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from typing import Final, NamedTuple

_FIELDS: Final = ("gpu_uuid", "pid", "used_memory", "process_name")
_MIB: Final = 2**20
_TIMEOUT_S: Final = 5.0


class Tenant(NamedTuple):
    """A process and the bytes of the device it holds."""

    pid: int
    name: str
    used_bytes: int


def co_tenants(uuid: str) -> list[Tenant]:
    """The other processes on the GPU `uuid`, the largest first. None of them where nothing can be
    learned."""
    command = ["nvidia-smi", f"--query-compute-apps={','.join(_FIELDS)}"]
    try:
        ran = subprocess.run(
            [*command, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=True,
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_tenants(ran.stdout, uuid, os.getpid())


def parse_tenants(text: str, uuid: str, own_pid: int) -> list[Tenant]:
    """Of lines "uuid, pid, MiB, name". A list without ourselves is of another PID namespace: which
    of its processes is this one, nobody knows."""
    tenants = [tenant for line in text.splitlines() if (tenant := _tenant(line, uuid))]
    others = [tenant for tenant in tenants if tenant.pid != own_pid]
    if len(others) == len(tenants):
        return []
    return sorted(others, key=lambda tenant: tenant.used_bytes, reverse=True)


def _tenant(line: str, uuid: str) -> Tenant | None:
    """None for a process on another device, or one whose memory the driver does not tell."""
    cells = [cell.strip() for cell in line.split(",", len(_FIELDS) - 1)]
    if len(cells) == len(_FIELDS) and cells[0].removeprefix("GPU-") == uuid.removeprefix("GPU-"):
        with suppress(ValueError):
            return Tenant(int(cells[1]), cells[3].rpartition("/")[2], int(cells[2]) * _MIB)
    return None

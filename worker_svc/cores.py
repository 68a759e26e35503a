"""How many cores this process may compute on."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Final

_CGROUP: Final = Path("/sys/fs/cgroup")


def shared_cores(n_workers: int) -> int:
    """The share of each of `n_workers` in the cores of this machine; at least one."""
    return max(1, usable_cores() // n_workers)


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """The cores it is bound to, or its control group's share if that is less."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return cores if quota == "max" else min(cores, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        return cores

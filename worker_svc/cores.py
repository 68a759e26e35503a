"""How many cores this process may compute on."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Final

_CGROUP: Final = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """The cores it is bound to, or its control group's share if that is less."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return cores if quota == "max" else min(cores, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        return cores

"""Memory of a process tree, by service."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import psutil

_SERVICE_MODULE: Final = "pagemesh.cli"


class MemoryUse(NamedTuple):
    """Bytes. PSS counts a page shared by n processes as 1/n to each, so a sum of PSS is what they
    take together; a sum of RSS counts shared pages n times."""

    pss: int = 0
    rss: int = 0

    def plus(self, other: MemoryUse) -> MemoryUse:
        return MemoryUse(self.pss + other.pss, self.rss + other.rss)

    def peak(self, other: MemoryUse) -> MemoryUse:
        return MemoryUse(max(self.pss, other.pss), max(self.rss, other.rss))


class MemoryPeaks:
    """The peak of each service, and of all together at one moment."""

    def __init__(self) -> None:
        self.by_service: dict[str, MemoryUse] = {}
        self.total = MemoryUse()

    def add(self, sample: dict[str, MemoryUse]) -> None:
        total = MemoryUse()
        for service, use in sample.items():
            self.by_service[service] = use.peak(self.by_service.get(service, MemoryUse()))
            total = total.plus(use)
        self.total = self.total.peak(total)


def sample_tree(pid: int) -> dict[str, MemoryUse]:
    """What the process and its descendants hold now; those that end meanwhile are left out."""
    sample: defaultdict[str, MemoryUse] = defaultdict(MemoryUse)
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                service = service_of(process.cmdline())
                sample[service] = sample[service].plus(_use_of(process))
    return dict(sample)


def service_of(command: Sequence[str]) -> str:
    """The service that a command line runs: `worker`, `serve` (the launcher), `valkey` …"""
    if _SERVICE_MODULE in command[:-1]:
        return command[command.index(_SERVICE_MODULE) + 1]
    if any("valkey-server" in part for part in command):
        return "valkey"
    return "other"


def _use_of(process: psutil.Process) -> MemoryUse:
    """Where the system tells no PSS (macOS), what is the process's own stands in for it."""
    full = process.memory_full_info()
    return MemoryUse(getattr(full, "pss", full.uss), full.rss)

"""CPU time of processes, and of the services of a running mesh under a load."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Final, NamedTuple, TypeVar

import psutil

from pagemesh.bench.memory import service_of

SERVICES: Final = ("gateway", "tokenizer", "scheduler", "worker")
_US: Final = 1e6

Key = TypeVar("Key")


def cpu_s(processes: Mapping[Key, psutil.Process]) -> dict[Key, float]:
    """User and system seconds of each until now. Raises psutil.NoSuchProcess."""
    times = {key: process.cpu_times() for key, process in processes.items()}
    return {key: spent.user + spent.system for key, spent in times.items()}


def mesh_processes(pid: int) -> dict[int, psutil.Process]:
    """The services that the launcher `pid` runs now, by process id."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if service_of(process.cmdline()) in SERVICES:
                found[process.pid] = process
    return found


class Window(NamedTuple):
    """From `start_s` to `end_s` of the clock; CPU seconds by process id."""

    start_s: float
    end_s: float
    spent_s: dict[int, float]


class CpuUse(NamedTuple):
    """CPU microseconds for one output token by service, all its processes together; and the service
    of the process that used most, with its share of one core."""

    us_per_token: dict[str, float]
    busiest: str
    busiest_share: float


class CpuSamples:
    """CPU time of services over time. Where one has ended, psutil.NoSuchProcess is raised. `now_s`
    is the clock of `time.monotonic`."""

    def __init__(
        self, processes: Mapping[int, psutil.Process], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._now_s = now_s
        self._processes = processes
        self._services = {pid: service_of(each.cmdline()) for pid, each in processes.items()}
        self._times_s: list[float] = []
        self._spent_s: list[dict[int, float]] = []

    def add(self) -> None:
        self._spent_s.append(cpu_s(self._processes))
        self._times_s.append(self._now_s())

    def busiest(self, seconds: float) -> Window:
        """The window of about `seconds` in which most CPU time went: a load of this duration has
        its process' start before it and its end behind. There must be two samples."""
        return max(self._windows(seconds), key=lambda window: sum(window.spent_s.values()))

    def use(self, window: Window, n_tokens: int) -> CpuUse:
        us_per_token: defaultdict[str, float] = defaultdict(float)
        for pid, spent_s in window.spent_s.items():
            us_per_token[self._services[pid]] += spent_s / n_tokens * _US
        pid, most_s = max(window.spent_s.items(), key=lambda item: item[1])
        seconds = window.end_s - window.start_s
        return CpuUse(dict(us_per_token), self._services[pid], most_s / seconds)

    def _windows(self, seconds: float) -> Iterator[Window]:
        """From each sample to the first that is `seconds` later; from the first to the last, if
        none is."""
        last = len(self._times_s) - 1
        for start, start_s in enumerate(self._times_s):
            end = bisect_left(self._times_s, start_s + seconds)
            if end <= last:
                yield self._window(start, end)
            elif start == 0:
                yield self._window(0, last)

    def _window(self, start: int, end: int) -> Window:
        before, after = self._spent_s[start], self._spent_s[end]
        spent_s = {pid: after[pid] - before[pid] for pid in after}
        return Window(self._times_s[start], self._times_s[end], spent_s)

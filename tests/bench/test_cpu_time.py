"""CPU time of services: which seconds of a load count, and what a token costs in them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from parts.cpu_time import CpuSamples, CpuUse, cpu_s


class Scripted:
    """A process that has used `spent_s` when it is asked for the first time, the second …"""

    def __init__(self, service: str, spent_s: Sequence[float]) -> None:
        self._service = service
        self._spent_s = iter(spent_s)

    def cmdline(self) -> list[str]:
        return ["python", "-m", "pagemesh.cli", self._service]

    def cpu_times(self) -> SimpleNamespace:
        return SimpleNamespace(user=next(self._spent_s), system=0.0)


def samples_of(*services: Any) -> CpuSamples:
    """Five samples, a second apart."""
    clock = iter(range(5))
    samples = CpuSamples(dict(enumerate(services)), now_s=lambda: float(next(clock)))
    for _ in range(5):
        samples.add()
    return samples


def test_the_seconds_of_the_load_count_alone() -> None:
    worker = Scripted("worker", [1.0, 1.1, 2.0, 2.8, 2.8])
    gateway = Scripted("gateway", [0.0, 0.0, 0.2, 0.3, 0.4])
    samples = samples_of(worker, gateway)
    window = samples.busiest(2.0)
    assert (window.start_s, window.end_s) == (1.0, 3.0)
    use = samples.use(window, 1000)
    assert use.us_per_token == pytest.approx({"worker": 1700.0, "gateway": 300.0})
    assert (use.busiest, use.busiest_share) == ("worker", pytest.approx(0.85))


def test_processes_of_one_service_cost_together_and_are_busy_apart() -> None:
    gateways = (Scripted("gateway", [0.0, 0.1, 0.2, 0.3, 0.4]) for _ in range(2))
    samples = samples_of(*gateways, Scripted("worker", [0.0, 0.15, 0.3, 0.45, 0.6]))
    use = samples.use(samples.busiest(4.0), 1000)
    assert use.us_per_token == pytest.approx({"gateway": 800.0, "worker": 600.0})
    assert (use.busiest, use.busiest_share) == ("worker", pytest.approx(0.15))


def test_a_load_longer_than_the_samples_takes_all_of_them() -> None:
    samples = samples_of(Scripted("worker", [0.0, 1.0, 2.0, 3.0, 4.0]))
    assert samples.use(samples.busiest(9.0), 1000) == CpuUse({"worker": 4000.0}, "worker", 1.0)


def test_user_and_system_time_count() -> None:
    spent = os.times()
    assert cpu_s({"own": psutil.Process()})["own"] >= spent.user + spent.system - 0.02

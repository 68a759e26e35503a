"""Whose memory it is, and how high it got."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pagemesh.bench.memory import MemoryPeaks, MemoryUse, sample_tree, service_of
from pagemesh.bench.report_local import startup_json, startup_lines
from pagemesh.bench.startup import StartupRun, worker_events


@pytest.mark.parametrize(
    ("command", "service"),
    [
        (["python", "-m", "pagemesh.cli", "worker"], "worker"),
        (["python", "-m", "pagemesh.cli", "serve", "--port", "1"], "serve"),
        (["python", "-m", "pagemesh.die_with_parent", "7", "python", "-m", "pagemesh.cli",
          "gateway"], "gateway"),
        (["/lib/valkey-server", "-"], "valkey"),
        (["python", "-m", "pagemesh.die_with_parent", "7", "/lib/valkey-server", "-"], "valkey"),
        (["sh"], "other"),
        ([], "other"),
    ],
)  # fmt: skip
def test_a_command_line_names_its_service(command: list[str], service: str) -> None:
    assert service_of(command) == service


def test_the_peak_of_all_is_of_one_moment() -> None:
    peaks = MemoryPeaks()
    peaks.add({"a": MemoryUse(10, 20), "b": MemoryUse(1, 2)})
    peaks.add({"a": MemoryUse(2, 3), "b": MemoryUse(5, 30)})
    peaks.add({})
    assert peaks.by_service == {"a": MemoryUse(10, 20), "b": MemoryUse(5, 30)}
    assert peaks.total == MemoryUse(11, 33)


def test_a_living_process_holds_memory_and_a_gone_one_none() -> None:
    # One of its own: this one's children, if other tests have left any, count too.
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        (use,) = sample_tree(process.pid).values()
        process.communicate(b"\n")
    assert 0 < use.pss <= use.rss
    assert sample_tree(2**22) == {}


def test_medians_of_moments_and_the_highest_of_peaks() -> None:
    runs = [StartupRun(1.0, 2.0, 3.0), StartupRun(3.0, 4.0, 7.0)]
    runs[0].memory.add({"worker": MemoryUse(2**20, 2**21), "gateway": MemoryUse(2**20, 2**20)})
    runs[1].memory.add({"worker": MemoryUse(3 * 2**20, 2**21)})
    runs[0].worker_stages_s = {"imports": 1.0, "kv_pool": 0.5}
    runs[1].worker_stages_s = {"imports": 2.0, "kv_pool": 1.0, "graphs": 3.0}
    figures = startup_json(runs)
    moments = [figures[f"median_{name}_s"] for name in ("listening", "ready", "first_answer")]
    assert moments == [2.0, 3.0, 5.0]
    assert figures["median_worker_stages_s"] == {"imports": 1.5, "kv_pool": 0.75, "graphs": 1.5}
    assert figures["runs"][1]["worker_stages_s"]["graphs"] == 3.0
    assert figures["peak_memory_bytes"]["worker"] == {"pss": 3 * 2**20, "rss": 2**21}
    assert figures["peak_memory_bytes"]["all together"] == {"pss": 3 * 2**20, "rss": 3 * 2**20}
    lines = list(startup_lines(runs))
    assert lines[0].split() == ["listening", "2.00", "s", "(1.00", "3.00)"]
    assert lines[3] == "the worker's start"
    assert lines[5].split() == ["kv", "pool", "0.75", "s", "(0.50", "1.00)"]
    assert lines[-1].split() == ["all", "together", "3.0", "3.0"]


def test_what_the_worker_logs_is_read_from_among_everything_else() -> None:
    log = """\
pagemesh: a line of text
{"event": "started", "service": "scheduler", "seconds": 1}
{"event": "started", "service": "worker", "level": "info", "seconds": {"total": 2.5}}
["started"]
{"event": "memory_divided", "service": "worker", "kv_blocks": 7, "timestamp": "now"}
"""
    assert worker_events(log) == {
        "started": {"seconds": {"total": 2.5}},
        "memory_divided": {"kv_blocks": 7},
    }

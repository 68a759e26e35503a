"""The scripts that start servers, on scripted ones: figures arrive, and nothing stays behind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

_ROOT = Path(__file__).parents[2]
_SERVER = Path(__file__).with_name("scripted_process.py")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The command line of a server that no process may still run at the end of the test."""
    mark = str(tmp_path)
    yield f"{sys.executable} {_SERVER} {{port}} {mark}"
    lines = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
    assert not [line for line in lines if mark in line and str(_SERVER) in line]


def run(script: str, folder: Path, *flags: str) -> tuple[subprocess.CompletedProcess[str], Any]:
    path = folder / "figures.json"
    command = [sys.executable, str(_ROOT / "benchmarks" / script), "--json", str(path), *flags]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return ran, json.loads(path.read_text())


def test_servers_are_compared_row_by_row(tmp_path: Path, server: str) -> None:
    servers = ("--server", f"ours={server}", "--server", f"peer={server}")
    ran, figures = run(
        "cpu_peers.py", tmp_path, *servers, "--rounds", "2", "--scale", "0.02", "--rows", "one",
        "prefill", "prefix",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    keys = {"start", "memory", "memory_rss", "one", "prefill", "prefix"}
    for name in ("ours", "peer"):
        assert {key: len(values) for key, values in figures["samples"][name].items()} == (
            dict.fromkeys(keys, 2)
        )
        assert all(value > 0 for value in figures["medians"][name].values())
    assert set(figures["ratios"]) == {"ours"}
    ours, peer = figures["medians"]["ours"], figures["medians"]["peer"]
    expected = {key: ours[key] / peer[key] for key in keys}
    assert figures["ratios"]["ours"]["peer"] == pytest.approx(expected)
    assert "ours / peer" in ran.stdout


def test_a_server_that_does_not_start_is_named_and_the_others_go_on(
    tmp_path: Path, server: str
) -> None:
    broken = f"{sys.executable} -c 'raise SystemExit(\"no model {{port}}\")'"
    servers = ("--server", f"broken={broken}", "--server", f"whole={server}")
    ran, figures = run(
        "cpu_peers.py", tmp_path, *servers, "--rounds", "1", "--scale", "0.02", "--rows", "one"
    )
    assert ran.returncode == 1
    assert "broken (start): FAILED: it ended with 1:\nno model" in ran.stdout
    assert figures["medians"]["whole"]["one"] > 0
    assert figures["medians"]["broken"] == {}


def test_the_busy_neighbour_counts_what_failed(tmp_path: Path, server: str) -> None:
    flags = ("--server", server, "--rounds", "1", "--neighbours", "1")
    ran, figures = run("busy_neighbour.py", tmp_path, *flags)
    assert [load["streams"] for load in figures] == [1, 32], ran.stderr
    assert [load["failed"] for load in figures] == [0, 0]
    for load in figures:
        assert load["ratio"] == pytest.approx(load["busy_tok_s"][0] / load["quiet_tok_s"][0])

"""The benchmark of the whole mesh with a scripted worker: figures arrive, for every hop."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from mesh_process import clean_environ

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "mesh_scripted.py"

pytestmark = pytest.mark.mesh


def run(folder: Path, *flags: str) -> list[str]:
    """The lines it prints. From another folder: ours has a `pagemesh` of its own."""
    command = [sys.executable, str(SCRIPT), *flags]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=folder, env=clean_environ()
    )
    return ran.stdout.splitlines()


def test_a_token_is_followed_from_the_worker_to_the_client(
    smollm2_folder: Path, tmp_path: Path
) -> None:
    assert smollm2_folder.is_dir()
    lines = run(tmp_path, "single", "--tokens", "120", "--step-ms", "1")
    figures = [re.findall(r"-?\d+\.\d+", line)[-2:] for line in lines[3:]]
    medians = [float(median) for median, _ in figures]
    hops, whole = medians[:8], medians[8]
    assert len(medians) == 11
    # A hop may round to nothing.
    assert all(0 <= hop <= whole for hop in hops)
    assert whole > 0


def test_streams_are_counted_and_their_tokens_paid_for(
    smollm2_folder: Path, tmp_path: Path
) -> None:
    assert smollm2_folder.is_dir()
    flags = ("--streams", "8", "--tokens", "100", "--rates", "2000")
    [_, line] = run(tmp_path, "streams", *flags, "--reader", "aiohttp")
    events = re.search(r"(\d\.\d+) events a token", line)
    assert events is not None
    assert 0 < float(events[1]) <= 1
    assert re.findall(r"(\w+) \d+\.\d\d", line) == [
        *("worker", "scheduler", "tokenizer", "gateway", "client", "together")
    ]

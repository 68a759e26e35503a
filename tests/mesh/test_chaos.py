"""A mesh under load that loses one process after the other: its clients notice silence alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from mesh_process import clean_environ

SCRIPT: Final = Path(__file__).parents[2] / "benchmarks" / "chaos.py"
# Pauses are figures of `make chaos`, on a machine that does nothing else.
PATIENT: Final = ("--max-pause-s", "60")

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(240)]


def test_every_token_comes_once_whoever_is_killed_frozen_or_cut(
    smollm2_folder: Path, tmp_path: Path
) -> None:
    """Answered, and counted by every service: see the exit code of benchmarks/chaos.py."""
    assert smollm2_folder.is_dir()
    faults = ("kill:worker", "freeze:scheduler", "cut:tokenizer")
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "scripted", "--streams", "32", *PATIENT, "--faults", *faults],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=clean_environ(),
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "nothing is off" in ran.stdout
    assert ran.stdout.count(" errors 0") >= len(faults) - 1  # no network is cut everywhere

"""Where compiled kernels are kept: in a folder of the user's cache, or nowhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import numpy as np
from pagemesh.kernels.cpu.sync import open_phases
words = np.zeros(16, np.int64)
open_phases(words, 1, 5)
print(words[0] >> 32)
"""


def run_kernel(cache: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "NUMBA_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment | {"XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_code_is_kept_by_the_source_of_all_kernels(tmp_path: Path) -> None:
    assert run_kernel(tmp_path) == "5"
    (folder,) = (tmp_path / "pagemesh" / "kernels").iterdir()
    kept = {path: path.stat().st_mtime_ns for path in folder.rglob("*.nbc")}
    assert kept
    assert run_kernel(tmp_path) == "5"
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.nbc")} == kept


def test_without_a_place_to_write_it_is_compiled_every_time(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert run_kernel(file) == "5"

"""The examples run as they stand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mesh_process import MeshProcess, clean_environ

pytestmark = pytest.mark.timeout(300)
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.mesh
def test_chat_keeps_the_conversation(mesh: MeshProcess) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "chat.py"), f"{mesh.base_url}/v1", "16"],
        input="My name is Ada.\nWhat is my name?\n\n",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("You are talking to smollm2-135m-instruct")
    assert len(done.stdout.splitlines()) >= 3


@pytest.mark.model
def test_the_offline_batch(smollm2_folder: Path) -> None:
    environ = {
        **clean_environ(),
        "PAGEMESH_DTYPE": "float32",
        "PAGEMESH_KV_CACHE_MEMORY": "256MiB",
    }
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "offline_batch.py")],
        capture_output=True,
        text=True,
        env=environ,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("'The capital of France is' → ")
    assert "Paris" in lines[0]
    assert any(line.startswith("choice 1: ") for line in lines)

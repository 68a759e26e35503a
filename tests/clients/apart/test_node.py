"""The clients of npm, each with tests of its own in node's runner."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from asked import KEY

FOLDER = Path(__file__).parent / "node"
NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="node is not installed")
@pytest.mark.skipif(
    not (FOLDER / "node_modules").is_dir(), reason="npm ci was not run: npm is not installed"
)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("client", ["openai", "ai"])
def test_client(client: str, base_url: str) -> None:
    assert NODE is not None
    done = subprocess.run(
        [NODE, "--test", "--test-reporter=spec", f"{client}.test.mjs"],
        cwd=FOLDER,
        env={**os.environ, "PAGEMESH_URL": base_url, "PAGEMESH_KEY": KEY},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout

"""A mesh that cannot start says why in one sentence and exits with code 2."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from mesh_process import clean_environ, free_port, serve_command

pytestmark = pytest.mark.mesh


def sentence_of(*flags: str) -> str:
    """The last line of a `serve` that ends by itself."""
    with TemporaryDirectory() as data:
        command = serve_command("--port", str(free_port()), "--data-dir", data, *flags)
        done = subprocess.run(command, capture_output=True, text=True, env=clean_environ())
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("pagemesh: error: ")
    assert done.stderr.count("pagemesh: error: ") == 1
    return last


def test_a_busy_port(smollm2_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sentence = sentence_of("--port", str(port))
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in sentence
    assert "--port" in sentence


def test_a_missing_model_folder(tmp_path: Path) -> None:
    missing = tmp_path / "absent-model"
    assert str(missing) in sentence_of(str(missing))


def test_too_little_memory(smollm2_folder: Path) -> None:
    sentence = sentence_of("--kv-cache-memory", "1KiB", "--dtype", "float32")
    assert "--kv-cache-memory" in sentence or "kv_cache_memory" in sentence


def test_a_registry_that_is_not_there(smollm2_folder: Path) -> None:
    sentence = sentence_of("--redis-url", "redis://:hidden@127.0.0.1:1")
    assert "cannot reach Redis at redis://:********@127.0.0.1:1" in sentence

"""A real mesh as a newcomer starts it: `pagemesh serve` in a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import psutil

# A model that is exact and a pool that is small, for tests.
SMALL_MESH = (
    *("--dtype", "float32"),
    *("--max-model-len", "2048"),
    *("--kv-cache-memory", "256MiB"),
    *("--log-level", "debug"),
)

SERVICES: Final = ("worker", "scheduler", "tokenizer", "gateway")
STOP_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.05


class MeshProcess(NamedTuple):
    """A running `pagemesh serve`. `log` holds what it and its children wrote to stderr."""

    base_url: str
    process: subprocess.Popen[str]
    log: Path

    def child(self, name: str) -> psutil.Process:
        """The process of a service that has one, or `valkey`."""
        found = self.all_of(name)
        assert len(found) == 1, f"{len(found)} children are called {name}"
        return found[0]

    def all_of(self, name: str) -> list[psutil.Process]:
        """The processes of one service."""
        return [child for child in self.children() if _is_named(child, name)]

    def has_child(self, name: str) -> bool:
        return any(_is_named(child, name) for child in self.children())

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


def _is_named(process: psutil.Process, name: str) -> bool:
    try:
        command = process.cmdline()
    except psutil.NoSuchProcess:
        return False
    if name == "valkey":
        return any(word.endswith("/valkey-server") for word in command[:1])
    return command[-2:] == ["pagemesh.cli", name]


def serve_command(*flags: str, python: str = sys.executable) -> list[str]:
    return [python, "-m", "pagemesh.cli", "serve", *flags]


def clean_environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PAGEMESH_")}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def running_mesh(folder: Path, *flags: str, python: str = sys.executable) -> Iterator[MeshProcess]:
    """Serve on a free port until the block ends; ready when the block begins. `python`: that of
    an environment with pagemesh."""
    with starting_mesh(folder, *flags, python=python) as mesh:
        _wait_for_banner(mesh)
        yield mesh


@contextmanager
def starting_mesh(folder: Path, *flags: str, python: str = sys.executable) -> Iterator[MeshProcess]:
    """As `running_mesh`, but the block begins at once."""
    port = free_port()
    log = folder / "mesh.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            serve_command(
                "--port", str(port), "--data-dir", str(folder / "data"), *flags, python=python
            ),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=clean_environ(),
        )
    try:
        yield MeshProcess(f"http://127.0.0.1:{port}", process, log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert process.wait(STOP_TIMEOUT_S) == 0
        assert process.stdout is not None
        process.stdout.close()


def _wait_for_banner(mesh: MeshProcess) -> None:
    assert mesh.process.stdout is not None
    for line in mesh.process.stdout:
        if line.startswith("pagemesh serves "):
            return
    raise AssertionError(f"the mesh did not start:\n{mesh.log.read_text()}")


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Return as soon as `condition` holds; fail after `timeout_s`."""
    pause = threading.Event()
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s"
        pause.wait(_POLL_S)

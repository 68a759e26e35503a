"""A server under measurement: started from its command line, watched, and stopped with its tree."""

from __future__ import annotations

import http.client
import json
import shlex
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil

from pagemesh.bench.memory import MemoryPeaks, sample_tree
from parts.services import free_port

_POLL_S: Final = 0.01
_MEMORY_PERIOD_S: Final = 1.0
_ANSWER_TIMEOUT_S: Final = 60.0
_STOP_S: Final = 60.0
_TAIL_CHARS: Final = 2000


class Command(NamedTuple):
    """`line` is split as a shell would, without running one; `{port}` in it is replaced."""

    name: str
    line: str

    def argv(self, port: int) -> list[str]:
        return [part.replace("{port}", str(port)) for part in shlex.split(self.line)]


class ServerFailed(Exception):
    """The server ended, or did not answer in time; the message holds its last words."""


@dataclass(slots=True)
class Served:
    """`start_s` is from the start of the command to a completion of one token, in seconds."""

    port: int
    log: Path
    process: subprocess.Popen[bytes]
    start_s: float = 0.0
    memory: MemoryPeaks = field(default_factory=MemoryPeaks)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def check(self) -> None:
        """Raises ServerFailed if it has ended."""
        if self.process.poll() is not None:
            raise ServerFailed(f"it ended with {self.process.returncode}:\n{tail(self.log)}")

    def await_answer(self, timeout_s: float) -> None:
        """Ask for the model's name, then for one token of it, until both are answered. Raises
        ServerFailed."""
        deadline_s = time.monotonic() + timeout_s
        model = None
        while True:
            model = model or _model(self.port)
            if model is not None and _answers(self.port, model):
                return
            self.check()
            if time.monotonic() > deadline_s:
                raise ServerFailed(f"it did not answer in time:\n{tail(self.log)}")
            time.sleep(_POLL_S)


@contextmanager
def served(
    command: Command,
    log: Path,
    timeout_s: float,
    *,
    environ: Mapping[str, str] | None = None,
    watches_memory: bool = True,
) -> Iterator[Served]:
    """Start the server and wait for its first answer. Its output goes to `log`. Its environment is
    ours, or `environ`.

    Raises ServerFailed. On leaving, every process of its tree is gone.
    """
    port = free_port()
    started_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command.argv(port),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
        )
    server = Served(port, log, process)
    try:
        with _watched_memory(process.pid, server.memory) if watches_memory else nullcontext():
            server.await_answer(timeout_s)
            server.start_s = time.monotonic() - started_s
            yield server
    finally:
        _stop(process)


def _model(port: int) -> str | None:
    match _ask(port, "GET", "/v1/models"):
        case {"data": [{"id": str(model)}, *_]}:
            return model
    return None


def _answers(port: int, model: str) -> bool:
    body = {"model": model, "prompt": "Hello", "max_tokens": 1}
    return _ask(port, "POST", "/v1/completions", json.dumps(body)) is not None


def _ask(port: int, method: str, path: str, body: str | None = None) -> Any:
    """The JSON of a 200; None for any other answer, or none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_TIMEOUT_S)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return json.loads(answer.read()) if answer.status == 200 else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()


def tail(log: Path) -> str:
    """The last words of a process that writes there."""
    return log.read_text(errors="replace")[-_TAIL_CHARS:]


@contextmanager
def _watched_memory(pid: int, peaks: MemoryPeaks) -> Iterator[None]:
    """Peaks while the block runs: reading PSS walks page tables, so it is not done often."""
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(_MEMORY_PERIOD_S):
            peaks.add(sample_tree(pid))

    sampling = threading.Thread(target=sample, daemon=True)
    sampling.start()
    try:
        yield
        peaks.add(sample_tree(pid))
    finally:
        ended.set()
        sampling.join()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the server, then SIGKILL to whatever of its tree is left."""
    tree: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        tree = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    process.kill()
    process.wait()
    for child in tree:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(tree)

"""Runs of `pagemesh bench serve` against a mesh, with the CPU time of its services meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import psutil

from pagemesh.bench.environment import CardSamples
from parts.cpu_time import CpuSamples, mesh_processes
from parts.load_command import load_command
from parts.served import Served, tail

_PERIOD_S: Final = 0.1


class Load(NamedTuple):
    """`n_prompts` random requests of one length, `concurrency` at a time."""

    n_prompts: int
    input_len: int
    output_len: int
    concurrency: int
    clients: int
    seed: int

    def flags(self, url: str, json: Path) -> dict[str, object]:
        return {
            "base-url": url,
            "dataset-name": "random",
            "num-prompts": self.n_prompts,
            "random-input-len": self.input_len,
            "random-output-len": self.output_len,
            "temperature": 0,
            "max-concurrency": self.concurrency,
            "clients": self.clients,
            "seed": self.seed,
            "json": json,
        }


class LoadFailed(Exception):
    """The run is worth nothing; the message says why. Another one may succeed."""


def run_load(
    server: Served, load: Load, card: CardSamples, folder: Path, timeout_s: float
) -> dict[str, Any]:
    """The JSON of the run, with the services' CPU time and what the card did. Its output and its
    JSON stay in `folder`.

    Raises LoadFailed, and ServerFailed if the server has ended or answers nothing.
    """
    stem = folder / f"load-{load.concurrency}-{load.seed}"
    path, log = stem.with_suffix(".json"), stem.with_suffix(".log")
    path.unlink(missing_ok=True)
    server.await_answer(timeout_s)
    try:
        samples = _sampled_run(server, load_command(load.flags(server.url, path)), log, timeout_s)
    except psutil.NoSuchProcess as error:
        server.check()
        raise LoadFailed(f"a service ended:\n{tail(server.log)}") from error
    figures = _figures(path, log)
    window = samples.busiest(figures["duration"])
    return figures | {
        "cpu": samples.use(window, figures["total_output_tokens"])._asdict(),
        "gpu": card.between(window.start_s, window.end_s),
    }


def _sampled_run(
    server: Served, command: tuple[str, ...], log: Path, timeout_s: float
) -> CpuSamples:
    samples = CpuSamples(mesh_processes(server.process.pid))
    deadline_s = time.monotonic() + timeout_s
    with _running(command, log) as process:
        while process.poll() is None:
            server.check()
            samples.add()
            if time.monotonic() > deadline_s:
                raise LoadFailed(f"the load took over {timeout_s:.0f} s:\n{tail(log)}")
            time.sleep(_PERIOD_S)
        samples.add()
    return samples


@contextmanager
def _running(command: tuple[str, ...], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """In a session of its own; on leaving its client processes are gone too."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _figures(path: Path, log: Path) -> dict[str, Any]:
    if not path.exists():
        raise LoadFailed(f"the load wrote no figures:\n{tail(log)}")
    figures: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    if figures["failed"]:
        raise LoadFailed(f"{figures['failed']} requests failed: {figures['failures']}")
    return figures

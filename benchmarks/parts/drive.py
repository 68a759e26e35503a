"""Load that only counts bytes: by wrk where it is installed, by processes of ours elsewhere."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Literal

import msgspec

from parts.services import python_path

PATH: Final = "/v1/completions"
MARK: Final = "counted: "
LONGEST_S: Final = 120
_SCRIPT: Final = """
wrk.method = "POST"
wrk.path = "%s"
wrk.headers["Content-Type"] = "application/json"
wrk.body = [[%s]]
function done(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    '%s{"requests":%%d,"bytes":%%d,"errors":%%d,"p50_s":%%f,"p99_s":%%f}\\n',
    summary.requests, summary.bytes,
    errors.connect + errors.read + errors.write + errors.status,
    latency:percentile(50) / 1e6, latency:percentile(99) / 1e6))
end
"""

Tool = Literal["wrk", "ours"]


class Drive(msgspec.Struct, kw_only=True):
    """`connections` that ask again and again with `body`, read by `threads` (of wrk) or as many
    processes, on `cores`; None: on any."""

    url: str
    body: bytes
    connections: int
    threads: int
    cores: list[int] | None = None


class Driven(msgspec.Struct, kw_only=True):
    """`bytes` of whole responses and unfinished ones; times, in seconds, are of whole ones."""

    requests: int
    bytes: int
    errors: int
    p50_s: float
    p99_s: float


def default_tool() -> Tool:
    return "wrk" if shutil.which("wrk") else "ours"


class Driver:
    """Loads a server from its start until it is stopped, or for `LONGEST_S`."""

    def __init__(self, load: Drive, tool: Tool) -> None:
        self._load = load
        self._tool = tool
        self._processes: list[asyncio.subprocess.Process] = []
        self._stack = ExitStack()

    async def start(self) -> None:
        """Raises RuntimeError without the tool."""
        if self._tool == "ours":
            n = self._load.threads
            each = msgspec.structs.replace(self._load, connections=self._load.connections // n)
            asked = msgspec.json.encode(each).decode()
            command = (sys.executable, "-m", "parts.byte_client", asked)
            self._processes = [await self._begin(*command) for _ in range(n)]
            for process in self._processes:
                assert process.stdout is not None
                await process.stdout.readline()  # it is connected
        elif shutil.which("wrk") is None:
            raise RuntimeError("wrk is not installed: apt-get install wrk, or use --tool ours")
        else:
            self._processes = [await self._begin(*self._wrk())]

    async def stop(self) -> Driven:
        """What was counted. Raises RuntimeError when the tool failed or an answer was no 200."""
        for process in self._processes:
            if process.returncode is None:
                process.send_signal(signal.SIGINT)
        outputs = [(await process.communicate())[0].decode() for process in self._processes]
        self._stack.close()
        driven = _together([_counted(output) for output in outputs])
        if driven.errors:
            raise RuntimeError(f"{driven.errors} connections or answers failed")
        return driven

    def _wrk(self) -> Sequence[str]:
        load = self._load
        script = Path(self._stack.enter_context(TemporaryDirectory())) / "script.lua"
        script.write_text(_SCRIPT % (PATH, load.body.decode(), MARK))
        size = (f"-t{load.threads}", f"-c{load.connections}", f"-d{LONGEST_S}s")
        return ("wrk", *size, "--timeout", f"{LONGEST_S}s", "-s", str(script), load.url)

    async def _begin(self, *command: str) -> asyncio.subprocess.Process:
        cores = ",".join(map(str, self._load.cores or ()))
        return await asyncio.create_subprocess_exec(
            *(("taskset", "-c", cores) if cores else ()),
            *command,
            env={**os.environ, "PYTHONPATH": python_path()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )


def _counted(output: str) -> Driven:
    _, found, counted = output.partition(MARK)
    if not found:
        raise RuntimeError(f"the load tool said:\n{output}")
    return msgspec.json.decode(counted.splitlines()[0], type=Driven)


def _together(counts: Sequence[Driven]) -> Driven:
    """The worst times of any."""
    return Driven(
        requests=sum(each.requests for each in counts),
        bytes=sum(each.bytes for each in counts),
        errors=sum(each.errors for each in counts),
        p50_s=max(each.p50_s for each in counts),
        p99_s=max(each.p99_s for each in counts),
    )

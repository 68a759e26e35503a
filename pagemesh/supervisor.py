"""Child processes: start, forward the output, restart with back-off, stop in order.

Each child runs in a session of its own, so that a Ctrl-C in the terminal reaches only the
supervisor, and under `die_with_parent`, so that none outlives it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any, Final, NamedTuple

import structlog

from pagemesh.shared.errors import PagemeshError, StartupError

MAX_TRIES: Final = 3
FIRST_BACKOFF_S: Final = 0.2
MAX_BACKOFF_S: Final = 10.0
STABLE_S: Final = 30.0
TAIL_LINES: Final = 20
ERROR_PREFIX: Final = "pagemesh: error: "
EXIT_STARTUP: Final = 2
_MAX_LINE_BYTES: Final = 64 * 1024
_LAST_OUTPUT_S: Final = 1.0

WriteLine = Callable[[str, str], None]
log = structlog.get_logger(__name__)


class ChildSpec(NamedTuple):
    """What to run. `config` is written to its standard input. The output of a `quiet` child is
    shown only when the child fails."""

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str]
    config: bytes = b""
    quiet: bool = False


class ChildFailed(PagemeshError):
    """A child ended again and again before the mesh was ready."""

    def __init__(self, name: str, exit_code: int, tail: list[str]) -> None:
        lines = "\n".join(f"  {line}" for line in tail) or "  (it wrote nothing)"
        super().__init__(
            f"{name} cannot start ({describe_exit(exit_code)}, {MAX_TRIES} tries); "
            f"its last lines:\n{lines}"
        )
        self.name = name
        self.exit_code = exit_code
        self.tail = tail


class Child:
    """One child and, after a restart, its successors. Owner of the current process."""

    def __init__(self, spec: ChildSpec, write_line: WriteLine) -> None:
        self.spec = spec
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.sentence: str | None = None
        self.retired = False
        self._write_line = write_line
        self._process: asyncio.subprocess.Process | None = None

    async def run_once(self) -> int:
        """Start the process, forward its output until it ends, and return its exit code."""
        self.sentence = None
        process = await asyncio.create_subprocess_exec(
            *guarded(self.spec.command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(self.spec.environ),
            start_new_session=True,
        )
        self._process = process
        output = asyncio.create_task(self._forward(process), name=f"output-{self.spec.name}")
        try:
            await self._configure(process)
            return await process.wait()
        except asyncio.CancelledError:
            self.send_signal(signal.SIGKILL)
            raise
        finally:
            # A grandchild may hold the pipe open for longer.
            await asyncio.wait({output}, timeout=_LAST_OUTPUT_S)
            output.cancel()

    def send_signal(self, signum: int) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signum)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL when the process is still there after `grace_s`."""
        if self._process is None:
            return
        self.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), timeout=grace_s)
        except TimeoutError:
            log.warning("killing_child", child=self.spec.name, grace_s=grace_s)
            self.send_signal(signal.SIGKILL)
            await self._process.wait()

    async def _configure(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        with suppress(ConnectionError):
            process.stdin.write(self.spec.config)
            await process.stdin.drain()
        process.stdin.close()

    async def _forward(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in _lines(process.stdout):
            self.tail.append(line)
            if line.startswith(ERROR_PREFIX):
                self.sentence = line.removeprefix(ERROR_PREFIX)
            elif not self.spec.quiet:
                self._write_line(self.spec.name, line)


class Supervisor:
    """The children of one mesh, in the order they were started."""

    def __init__(self, write_line: WriteLine) -> None:
        self._write_line = write_line
        self._groups: list[list[Child]] = []
        self._keepers: dict[Child, asyncio.Task[None]] = {}
        self._failures: asyncio.Queue[BaseException] = asyncio.Queue()
        self._ready = False
        self._stopping = False

    def start(self, *specs: ChildSpec) -> list[Child]:
        """What is started together is stopped together: it is one group."""
        group: list[Child] = []
        self._groups.append(group)
        for spec in specs:
            self.start_in(group, spec)
        return group

    def start_in(self, group: list[Child], spec: ChildSpec) -> Child:
        """Start one more child of a group."""
        child = Child(spec, self._write_line)
        group.append(child)
        keeper = asyncio.create_task(self._keep(child), name=f"keep-{spec.name}")
        self._keepers[child] = keeper
        keeper.add_done_callback(self._note_failure)
        return child

    async def retire(self, group: list[Child], child: Child, grace_s: float) -> None:
        """Stop one child of a group for good; nobody starts it again."""
        child.retired = True
        await child.stop(grace_s)
        keeper = self._keepers.pop(child)
        await asyncio.wait({keeper}, timeout=2 * _LAST_OUTPUT_S)
        keeper.cancel()  # it may wait for the time of a restart
        group.remove(child)

    def _note_failure(self, keeper: asyncio.Task[None]) -> None:
        error = None if keeper.cancelled() else keeper.exception()
        if error is not None:
            self._failures.put_nowait(error)

    def mark_ready(self) -> None:
        """The mesh has worked once: from now on a child that ends is restarted for ever."""
        self._ready = True

    async def watch(self) -> None:
        """Wait for a child that cannot start. Raises StartupError or ChildFailed."""
        raise await self._failures.get()

    async def stop(self, grace_s: float) -> None:
        """Stop the children, the last started first; those started together at the same time."""
        self._stopping = True
        for group in reversed(self._groups):
            await asyncio.gather(*(child.stop(grace_s) for child in group))
        keepers = list(self._keepers.values())
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)

    def kill(self) -> None:
        self._stopping = True
        for child in chain.from_iterable(self._groups):
            child.send_signal(signal.SIGKILL)

    async def _keep(self, child: Child) -> None:
        failures = 0
        while not self._stopping:
            started_s = time.monotonic()
            exit_code = await child.run_once()
            if self._stopping or child.retired:
                return
            failures = 1 if time.monotonic() - started_s > STABLE_S else failures + 1
            if not self._ready:
                _give_up_if_hopeless(child, exit_code, failures)
            await asyncio.sleep(_announce_restart(child, exit_code, failures))


def _give_up_if_hopeless(child: Child, exit_code: int, failures: int) -> None:
    if exit_code == EXIT_STARTUP and child.sentence is not None:
        raise StartupError(child.sentence)
    if failures >= MAX_TRIES:
        raise ChildFailed(child.spec.name, exit_code, list(child.tail))


def _announce_restart(child: Child, exit_code: int, failures: int) -> float:
    """Log the end of a child; return how long to wait before the next start."""
    wait_s = min(FIRST_BACKOFF_S * 2.0 ** (failures - 1), MAX_BACKOFF_S)
    log.error(
        "child_ended",
        child=child.spec.name,
        ended=describe_exit(exit_code),
        sentence=child.sentence,
        last_lines=list(child.tail)[-5:],
        restart_in_s=wait_s,
    )
    return wait_s


def guarded(command: tuple[str, ...]) -> tuple[str, ...]:
    """`command`, to be started by this process and not to outlive it."""
    return (sys.executable, "-m", "pagemesh.die_with_parent", str(os.getpid()), *command)


def describe_exit(exit_code: int) -> str:
    """`exit code 3`, or the signal that ended the process."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines of any length: what is longer than the limit comes in pieces."""
    rest = b""
    while chunk := await reader.read(_MAX_LINE_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
        if len(rest) > _MAX_LINE_BYTES:
            yield rest.decode(errors="replace")
            rest = b""
    if rest:
        yield rest.decode(errors="replace")


async def first(*work: Coroutine[Any, Any, None]) -> None:
    """Wait for the first of `work` to end, cancel the others, raise what it raised."""
    tasks = {asyncio.create_task(one) for one in work}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()

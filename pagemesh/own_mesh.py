"""A mesh for one command: `pagemesh serve` in a process of its own, gone when the command ends.

It keeps nothing, and finds nothing that another of its name has kept: no pause, no routes.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from tempfile import TemporaryDirectory
from typing import IO, Final

from msgspec.structs import replace

from pagemesh.shared.settings import Settings
from pagemesh.shared.settings_sources import environ_of, is_ours
from pagemesh.supervisor import guarded

_STOP_MARGIN_S: Final = 10.0


@asynccontextmanager
async def own_mesh(settings: Settings, stderr: IO[bytes] | None = None) -> AsyncIterator[Process]:
    """Started when the block begins, stopped and gone when it ends. Without `stderr`, ours."""
    inherited = {name: value for name, value in os.environ.items() if not is_ours(name)}
    with TemporaryDirectory(prefix="pagemesh-", ignore_cleanup_errors=True) as folder:
        settings = replace(settings, mesh=replace(settings.mesh, data_dir=folder))
        process = await asyncio.create_subprocess_exec(
            *guarded((sys.executable, "-m", "pagemesh.cli", "serve")),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=stderr,
            env={**inherited, **environ_of(settings)},
        )
        try:
            yield process
        finally:
            await _stop(process, settings.mesh.drain_timeout_s + _STOP_MARGIN_S)


async def _stop(process: Process, grace_s: float) -> None:
    """SIGTERM, then SIGKILL; the services never outlive the launcher."""
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), grace_s)
    except TimeoutError:
        process.kill()
        await process.wait()

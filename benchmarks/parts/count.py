"""A client process, run to its end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import msgspec

from parts.client import Counts, Load
from parts.services import python_path


async def count(load: Load) -> Counts:
    """Raises RuntimeError when it fails."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "parts.client", msgspec.json.encode(load).decode()),
        env={**os.environ, "PYTHONPATH": python_path()},
        stdout=subprocess.PIPE,
    )
    output, _ = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError("the client failed")
    return msgspec.json.decode(output, type=Counts)

"""`pagemesh bench serve` run beside a scripted server."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path
from typing import NamedTuple

import pytest
from scripted_server import Body, ScriptedServer

from pagemesh import cli

SMALL = ("--random-input-len", "6", "--random-output-len", "3")


class Ran(NamedTuple):
    exit_code: int
    out: str
    err: str
    figures: Body


class Bench:
    """Runs the command beside a scripted server, in a thread of its own."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.json = folder / "figures.json"
        self._capsys = capsys

    async def __call__(self, server: ScriptedServer, *flags: str) -> Ran:
        gc.collect()  # what tests before left behind may have its last words now, not among ours
        self._capsys.readouterr()
        async with server.running():
            argv = ["bench", "serve", "--base-url", server.url, "--json", str(self.json), *flags]
            exit_code = await asyncio.to_thread(cli.main, argv)
        captured = self._capsys.readouterr()
        figures = json.loads(self.json.read_text()) if self.json.exists() else {}
        return Ran(exit_code, captured.out, captured.err, figures)

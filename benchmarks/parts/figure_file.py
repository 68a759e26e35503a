"""Figures of a run on a card, kept as they come."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pagemesh.bench.engine import engine_settings
from pagemesh.bench.environment import environment
from pagemesh.shared.settings import Settings


class FigureFile:
    """A JSON object with settings and environment, written anew with every line that is said: a run
    may be cut off."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self._path = path
        self._begun_s = time.monotonic()
        self._where = {"settings": engine_settings(settings), "environment": environment()}

    def say(self, line: str, figures: Mapping[str, Any]) -> None:
        seconds = time.monotonic() - self._begun_s
        print(f"[{seconds:6.1f} s] {line}", flush=True)
        encoded = msgspec.json.encode({**figures, "seconds": seconds, **self._where})
        self._path.write_bytes(msgspec.json.format(encoded, indent=1))

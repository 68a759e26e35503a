"""`pagemesh bench serve` as a child process."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from pagemesh.supervisor import guarded


def load_command(flags: Mapping[str, object]) -> tuple[str, ...]:
    """Answers have the length that `flags` ask for. To be started by this process, and not to
    outlive it."""
    command = (sys.executable, "-m", "pagemesh.cli", "bench", "serve", "--ignore-eos")
    given = (part for name, value in flags.items() for part in (f"--{name}", str(value)))
    return guarded((*command, *given))

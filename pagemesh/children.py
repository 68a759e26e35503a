"""The children of `pagemesh serve`: how each is started and how its lines are shown."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from typing import Final

from pagemesh.shared.settings import Settings
from pagemesh.shared.settings_sources import environ_of, is_ours
from pagemesh.supervisor import ChildSpec, WriteLine

# Of the libraries, unless the user has set it himself: what computes has threads of its own.
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def service_spec(service: str, settings: Settings) -> ChildSpec:
    """One service with these settings. They travel by environment, the secrets among them."""
    command = (sys.executable, "-m", "pagemesh.cli", service)
    inherited = {name: value for name, value in os.environ.items() if not is_ours(name)}
    return ChildSpec(
        service,
        command,
        {**_ONE_THREAD, **_color(), **inherited, **environ_of(settings)},
    )


def _color() -> dict[str, str]:
    """Children write to a pipe; what they write ends in our terminal."""
    return {"FORCE_COLOR": "1"} if sys.stderr.isatty() and "NO_COLOR" not in os.environ else {}


def line_writer(settings: Settings) -> WriteLine:
    """How a child's line is shown: behind its name for people, one JSON object for machines."""
    human = settings.log.log_format == "human"

    def write(service: str, line: str) -> None:
        if human:
            shown = f"{service:<9} | {line}"
        elif line.startswith("{"):
            shown = line
        else:
            shown = json.dumps({"service": service, "level": "error", "event": line})
        with suppress(BrokenPipeError):
            print(shown, file=sys.stderr, flush=True)

    return write

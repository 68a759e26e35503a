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


def child_names(service: str, settings: Settings) -> list[str]:
    """Of all children that run one service: numbered if there are several."""
    n_children = {"gateway": settings.mesh.gateways, "tokenizer": settings.mesh.tokenizers}
    n = n_children.get(service, 1)
    return [service] if n == 1 else [f"{service}-{number}" for number in range(1, n + 1)]


def service_specs(service: str, settings: Settings) -> list[ChildSpec]:
    """All children that run one service. They differ in nothing but their names."""
    spec = service_spec(service, settings)
    return [spec._replace(name=name) for name in child_names(service, settings)]


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
    width = max(len(name) for name in child_names("tokenizer", settings))

    def write(service: str, line: str) -> None:
        if human:
            shown = f"{service:<{width}} | {line}"
        elif line.startswith("{"):
            shown = line
        else:
            shown = json.dumps({"service": service, "level": "error", "event": line})
        with suppress(BrokenPipeError):
            print(shown, file=sys.stderr, flush=True)

    return write

"""The children of `pagemesh serve`: how each is started and how its lines are shown."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, repeat
from typing import Final

from msgspec.structs import replace

from pagemesh.idle_gpus import VISIBLE
from pagemesh.shared.model_list import listed_models, n_workers
from pagemesh.shared.settings import Settings
from pagemesh.shared.settings_sources import environ_of, is_ours
from pagemesh.supervisor import ChildSpec, WriteLine

# Of the libraries, unless the user has set it himself: what computes has threads of its own.
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# In the order they start; they stop the other way round.
SERVICES: Final = ("worker", "scheduler", "tokenizer", "gateway")


def child_names(service: str, settings: Settings) -> list[str]:
    """Of all children that run one service: numbered if there are several."""
    n: int = n_workers(settings) if service == "worker" else getattr(settings.mesh, f"{service}s")
    return [service] if n == 1 else [f"{service}-{number}" for number in range(1, n + 1)]


def service_specs(service: str, settings: Settings, devices: Sequence[str] = ()) -> list[ChildSpec]:
    """All children that run one service. They differ in nothing but their names, and workers in
    their models and `devices`, if there is one for each."""
    names = child_names(service, settings)
    if service != "worker":
        spec = service_spec(service, settings)
        return [spec._replace(name=name) for name in names]
    specs = map(service_spec, repeat(service), _settings_of_workers(settings))
    own = ({VISIBLE: device} for device in devices) if devices else repeat({})
    return [
        spec._replace(name=name, environ={**spec.environ, **more})
        for name, spec, more in zip(names, specs, own, strict=False)
    ]


def _settings_of_workers(settings: Settings) -> Iterator[Settings]:
    """Each serves one model; all of them together share the machine."""
    mesh = replace(settings.mesh, workers=n_workers(settings))
    for model in listed_models(settings.model):
        yield from repeat(replace(settings, model=model, mesh=mesh), settings.mesh.workers)


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
    names = chain.from_iterable(child_names(service, settings) for service in SERVICES)
    width = max(map(len, names))

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

"""Compose files as Docker's Compose reads them, as far as ours go: several files, `${VARIABLES}`,
profiles. Pure but for reading the files.

https://docs.docker.com/reference/compose-file/ (merge, interpolation)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

_VARIABLE: Final = re.compile(r"\$\{(\w+)(?:(:[-?])([^}]*))?\}")
# Lists of these names are replaced by a later file's; other lists grow.
_REPLACED: Final = frozenset({"command", "entrypoint", "test"})


class MissingVariable(Exception):
    """`name` is needed and not set; `sentence` is what the file says then."""

    def __init__(self, name: str, sentence: str) -> None:
        super().__init__(f"{name}: {sentence}")
        self.name = name
        self.sentence = sentence


class Volume(NamedTuple):
    """`source` is a named volume, or a path that begins with a dot or a slash."""

    source: str
    path: str
    read_only: bool

    @property
    def is_named(self) -> bool:
        return not self.source.startswith((".", "/"))


class Dependency(NamedTuple):
    """`condition` is service_started, service_healthy or service_completed_successfully."""

    service: str
    condition: str


class Service(NamedTuple):
    """One service, every variable filled in. `target` is its stage of deploy/Dockerfile, None for
    an image that is not ours; `image` has no tag; `spec` is all that the file says."""

    name: str
    target: str | None
    image: str
    command: list[str]
    environment: dict[str, str]
    volumes: list[Volume]
    spec: dict[str, Any]

    @property
    def depends_on(self) -> list[Dependency]:
        wanted = self.spec.get("depends_on", {})
        if isinstance(wanted, list):
            return [Dependency(name, "service_started") for name in wanted]
        return [Dependency(name, each["condition"]) for name, each in wanted.items()]

    @property
    def stop_grace_s(self) -> float:
        return float(self.spec.get("stop_grace_period", "10s").removesuffix("s"))


def read_services(
    files: Iterable[Path], environ: Mapping[str, str], profiles: Iterable[str] = ()
) -> dict[str, Service]:
    """The services that `docker compose up` would start. Raises MissingVariable."""
    merged: dict[str, Any] = {}
    for file in files:
        merged = _merged(merged, yaml.safe_load(file.read_text()))
    filled = _filled(merged, environ)
    active = set(profiles)
    return {
        name: _service(name, spec)
        for name, spec in filled["services"].items()
        if not spec.get("profiles") or active & set(spec["profiles"])
    }


def _service(name: str, spec: dict[str, Any]) -> Service:
    build = spec.get("build", {})
    environment = {key: str(value) for key, value in spec.get("environment", {}).items()}
    volumes = [_volume(text) for text in spec.get("volumes", [])]
    # A later file's volume takes the place of an earlier one at the same path.
    by_path = {volume.path: volume for volume in volumes}
    return Service(
        name,
        build.get("target"),
        spec["image"].rpartition(":")[0],
        spec.get("command", []),
        environment,
        list(by_path.values()),
        spec,
    )


def _volume(text: str) -> Volume:
    source, path, *mode = text.split(":")
    return Volume(source, path, mode == ["ro"])


def _merged(older: Any, newer: Any, name: str = "") -> Any:
    if isinstance(older, dict) and isinstance(newer, dict):
        both = {key: _merged(older[key], newer[key], key) for key in older.keys() & newer.keys()}
        return {**older, **newer, **both}
    if isinstance(older, list) and isinstance(newer, list) and name not in _REPLACED:
        return older + newer
    return newer


def _filled(value: Any, environ: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _filled(each, environ) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, environ) for each in value]
    return interpolated(value, environ) if isinstance(value, str) else value


def interpolated(text: str, environ: Mapping[str, str]) -> str:
    """`${NAME}`, `${NAME:-default}` and `${NAME:?sentence}`. Raises MissingVariable."""

    def value(match: re.Match[str]) -> str:
        name, operator, rest = match.groups()
        if environ.get(name):
            return environ[name]
        if operator == ":?":
            raise MissingVariable(name, rest)
        return rest or ""

    return _VARIABLE.sub(value, text)

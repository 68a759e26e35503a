"""Which installed distributions an extra of this project brings along."""

from __future__ import annotations

import functools
import re
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path

ROOT = Path(__file__).parents[2]


def extra_requirements(extra: str) -> set[str]:
    """Names that `pip install pagemesh[extra]` asks for, extras of extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names: set[str] = set()
    for line in [*project["dependencies"], *project["optional-dependencies"][extra]]:
        inner = re.fullmatch(r"pagemesh\[(.+)\]", line)
        if inner is None:
            names.add(name_of(line))
            continue
        for other in inner[1].split(","):
            names |= extra_requirements(other)
    return names


def closure(names: set[str]) -> set[str]:
    """The distributions that come with `names`, as far as they are installed here."""
    owned = {normal(owner) for owners in packages_distributions().values() for owner in owners}
    found: set[str] = set()
    queue = [name for name in names if name in owned]
    while queue:
        name = queue.pop()
        if name not in found:
            found.add(name)
            queue += [needed for needed in dependencies_of(name) if needed in owned]
    return found


@functools.cache
def dependencies_of(distribution: str) -> frozenset[str]:
    lines = requires(distribution) or []
    return frozenset(name_of(line) for line in lines if "extra ==" not in line)


def name_of(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return normal(match.group())


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()

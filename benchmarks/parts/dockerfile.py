"""What the targets of a Dockerfile say about a container: variables, entry point, command, health
check. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

_CHECK: Final = re.compile(r"(?:--[\w-]+=\S+\s+)*CMD\s+(.*)")


class Image(NamedTuple):
    """The configuration of one target, with what it has from the stages below it. `layers` are the
    instructions that bring files, from the bottom."""

    environment: dict[str, str]
    user: str
    entrypoint: list[str]
    command: list[str]
    health_check: list[str]
    layers: list[str]


def read_targets(text: str) -> dict[str, Image]:
    """Every named stage of the Dockerfile `text`."""
    images: dict[str, Image] = {}
    name = ""
    for instruction, rest in _instructions(text):
        if instruction == "FROM":
            below, _, name = rest.split()
            images[name] = images.get(below, Image({}, "root", [], [], [], []))
        elif name:
            images[name] = _after(images[name], instruction, rest)
    return images


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            instruction, _, rest = line.strip().partition(" ")
            yield instruction, rest.strip()


def _after(image: Image, instruction: str, rest: str) -> Image:
    match instruction:
        case "ENV":
            pairs = dict(pair.split("=", 1) for pair in rest.split())
            return image._replace(environment={**image.environment, **pairs})
        case "USER":
            return image._replace(user=rest)
        case "ENTRYPOINT":
            return image._replace(entrypoint=json.loads(rest), command=[])
        case "CMD":
            return image._replace(command=json.loads(rest))
        case "HEALTHCHECK":
            check = _CHECK.fullmatch(rest)
            return image._replace(health_check=json.loads(check[1]) if check else [])
        case "RUN" | "COPY":
            return image._replace(layers=[*image.layers, f"{instruction} {rest}"])
    return image

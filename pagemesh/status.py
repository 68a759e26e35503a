"""`pagemesh status`: who is in a mesh, what they have to do, and who drives whom."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from pagemesh.shared.errors import StartupError
from pagemesh.shared.leases import Lease
from pagemesh.shared.registry import AWAY, Instance, Load, Registry, masked_url
from pagemesh.shared.settings import Settings

SERVICES: Final = ("gateway", "tokenizer", "scheduler", "worker")
_HEAD: Final = ("service", "instance", "address", "in flight", "at a time", "driven by", "models")


def show_status(settings: Settings) -> str:
    """A table of the mesh in the registry. Raises StartupError without one."""
    url = settings.mesh.redis_url
    if url is None:
        raise StartupError("status needs the registry of a mesh: set --redis-url redis://HOST:PORT")
    try:
        return table(asyncio.run(_rows(url, settings.mesh.mesh_name)))
    except AWAY as error:
        reason = str(error) or "no answer in time"
        raise StartupError(f"cannot reach Redis at {masked_url(url)}: {reason}") from error


async def _rows(url: str, mesh_name: str) -> list[tuple[str, ...]]:
    registry = Registry(url, mesh_name)
    try:
        rows = []
        for service in SERVICES:
            instances = await registry.instances(service)
            loads = await registry.loads(service)
            names = [each.instance_id for each in instances] if service == "worker" else []
            leases = await registry.leases.read(names)
            rows += [row(each, loads, leases) for each in instances]
        return rows
    finally:
        await registry.close()


def row(instance: Instance, loads: dict[str, Load], leases: dict[str, Lease]) -> tuple[str, ...]:
    name = instance.instance_id
    load, lease = loads.get(name, Load()), leases.get(name)
    capacity = "" if load.capacity is None else str(load.capacity)
    holder = lease.holder if lease is not None else ""
    models = ", ".join(instance.models)
    return instance.service, name, instance.address, str(load.in_flight), capacity, holder, models


def table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(_HEAD, *rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in (_HEAD, *rows)
    )
    return "\n".join(lines)

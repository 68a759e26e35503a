"""`pagemesh status` on a real registry."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from pagemesh.shared.errors import StartupError
from pagemesh.shared.registry import Instance, Load, Registry
from pagemesh.shared.settings import MeshSettings, Settings
from pagemesh.status import show_status


async def _fill(url: str, mesh_name: str) -> None:
    registry = Registry(url, mesh_name)
    worker = Instance("worker", "worker-1", "127.0.0.1:5", 1, models=["tiny", "small"])
    beats = [
        asyncio.create_task(registry.announce(worker, lambda: Load(3, 64))),
        asyncio.create_task(registry.announce(Instance("gateway", "gateway-1", "127.0.0.1:6", 1))),
    ]
    for service in ("worker", "gateway"):
        async for instances in registry.watch(service):
            if instances:
                break
    await registry.leases.claim("worker-1", "scheduler-1")
    for beat in beats:
        beat.cancel()
    await registry.close()


def test_who_is_there_and_what_they_do(redis_url: str, mesh_name: str) -> None:
    asyncio.run(_fill(redis_url, mesh_name))
    mesh = MeshSettings(redis_url=redis_url, mesh_name=mesh_name)
    head, gateway, worker = show_status(replace(Settings(), mesh=mesh)).splitlines()
    assert head.split()[:3] == ["service", "instance", "address"]
    assert gateway.split() == ["gateway", "gateway-1", "127.0.0.1:6", "0"]
    assert worker.split() == [
        *("worker", "worker-1", "127.0.0.1:5", "3", "64", "scheduler-1", "tiny,", "small")
    ]


@pytest.mark.parametrize("url", [None, "redis://127.0.0.1:1"])
def test_without_a_registry_it_says_so(url: str | None) -> None:
    with pytest.raises(StartupError, match="redis"):
        show_status(replace(Settings(), mesh=MeshSettings(redis_url=url)))

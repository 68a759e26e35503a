"""A service that is told to stop must stop, whatever its registry was doing at that moment."""

from __future__ import annotations

import asyncio

from pagemesh.shared.registry import Instance, Registry

# More turns of the event loop than a beat and a look take together.
MOMENTS = 80


async def beat_and_look(registry: Registry) -> None:
    instance = Instance("scheduler", "a", "127.0.0.1:1", 1)
    while True:
        await registry._beat(instance)
        await registry.instances("scheduler")


async def test_cancellation_arrives_at_every_moment(redis_url: str, mesh_name: str) -> None:
    registry = Registry(redis_url, mesh_name)
    for turns in range(MOMENTS):
        task = asyncio.create_task(beat_and_look(registry))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        _, still_running = await asyncio.wait({task}, timeout=5)
        assert not still_running, f"swallowed after {turns} turns"
    await registry.close()

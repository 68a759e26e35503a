"""What the registry costs Redis and those who ask, with many workers: a real Valkey, no services.

    python benchmarks/registry_cost.py [--workers 64 1000] [--looks 50]

Announces so many workers, leases them all to one scheduler, and measures each operation that a
service repeats: the CPU time of Valkey and that of the caller, in milliseconds, and what it
comes to in a second for each service that does it.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import msgspec
from parts.services import supervised
from redis.asyncio import Redis

from pagemesh.shared.leases import Lease
from pagemesh.shared.registry import HEARTBEAT_S, WATCH_PERIOD_S, WHOLE_LOOK_S, Instance, Registry
from pagemesh.shared.settings import MeshSettings, Settings

_MS: Final = 1e3
LIFE_MS: Final = 3_600_000


class Operation(NamedTuple):
    """`per_s` times a second, by each of the services `by`."""

    name: str
    by: str
    per_s: float
    run: Callable[[], Awaitable[object]]


async def announce_all(redis: Redis, mesh: str, workers: list[Instance]) -> None:
    """As `Registry.announce`, with keys that outlive the measurement."""
    async with redis.pipeline() as pipe:
        for worker in workers:
            key = f"{mesh}:instance:worker:{worker.instance_id}"
            pipe.set(key, msgspec.json.encode(worker), px=LIFE_MS)
            pipe.sadd(f"{mesh}:instances:worker", worker.instance_id)
        await pipe.execute()


def operations(registry: Registry, workers: list[Instance]) -> list[Operation]:
    names = [worker.instance_id for worker in workers]
    leases = {name: Lease(number, "scheduler") for number, name in enumerate(names)}
    look_s = 1 / WATCH_PERIOD_S
    return [
        Operation("heartbeat", "service", 1 / HEARTBEAT_S, lambda: registry._beat(workers[0])),
        Operation("no change", "scheduler", look_s, lambda: registry.latest("worker")),
        Operation(
            "all workers", "scheduler", 1 / WHOLE_LOOK_S, lambda: registry.instances("worker")
        ),
        Operation("all leases", "scheduler", look_s, lambda: registry.leases.read(names)),
        Operation("renew them", "all schedulers", look_s, lambda: registry.leases.renew(leases)),
    ]


async def valkey_cpu_s(redis: Redis) -> float:
    info = await redis.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


async def measure(url: str, n_workers: int, looks: int) -> None:
    mesh = f"cost-{n_workers}"
    registry, redis = Registry(url, mesh), Redis.from_url(url)
    workers = [
        Instance("worker", f"worker-{number:08x}", f"10.0.0.1:{number}", number)
        for number in range(n_workers)
    ]
    await announce_all(redis, mesh, workers)
    for operation in operations(registry, workers):
        await operation.run()
        cpu_s, began_s = await valkey_cpu_s(redis), time.process_time()
        for _ in range(looks):
            await operation.run()
        asker_s = (time.process_time() - began_s) / looks
        cpu_s = (await valkey_cpu_s(redis) - cpu_s) / looks
        print(
            f"{n_workers:>8}  {operation.name:<14}{cpu_s * _MS:>10.3f}{asker_s * _MS:>10.3f}"
            f"{cpu_s * operation.per_s:>10.2%} for each {operation.by}"
        )
    await registry.close()
    await redis.aclose()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 1000])
    parser.add_argument("--looks", type=int, default=50)
    args = parser.parse_args()
    print(f"{'workers':>8}  {'operation':<14}{'Valkey ms':>10}{'asker ms':>10}  Valkey's core")
    async with supervised(Settings(mesh=MeshSettings(mesh_secret="benchmark"))) as (settings, _):
        assert settings.mesh.redis_url is not None
        for n_workers in args.workers:
            await measure(settings.mesh.redis_url, n_workers, args.looks)


if __name__ == "__main__":
    asyncio.run(main())

"""The routes that were set at run time: the document `routes` of the mesh in Redis."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from redis.asyncio import Redis

from pagemesh.shared.routes import Route
from pagemesh.shared.versioned_key import Versioned, VersionedKey


class StoredRoutes(NamedTuple):
    """Version 0: none were ever set."""

    version: int = 0
    routes: dict[str, Route] = {}


class RouteKeys:
    """Raises redis.RedisError, OSError or TimeoutError when Redis is away."""

    def __init__(self, redis: Redis, mesh_name: str) -> None:
        self._key = VersionedKey(redis, mesh_name, "routes")

    async def newest(self, held: StoredRoutes) -> StoredRoutes:
        """What Redis holds, or `held` if that is newer, which Redis then holds too.

        Raises msgspec.DecodeError for what another version has written.
        """
        found = await self._key.newest(_written(held))
        if found is None:
            return StoredRoutes()
        return StoredRoutes(found.version, msgspec.json.decode(found.text, type=dict[str, Route]))

    async def replace(self, held: StoredRoutes, new: StoredRoutes) -> bool:
        """Whether `new` stands in Redis: it does not when `held` is no longer the newest."""
        return await self._key.replace(held.version, _written(new))


def _written(stored: StoredRoutes) -> Versioned:
    return Versioned(stored.version, msgspec.json.encode(stored.routes).decode())

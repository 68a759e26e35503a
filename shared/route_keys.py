"""The routes that were set at run time: the document `routes` of the mesh in Redis."""

from __future__ import annotations

from typing import NamedTuple

from redis.asyncio import Redis

from pagemesh.shared.routes import Route
from pagemesh.shared.versioned_key import VersionedKey


class StoredRoutes(NamedTuple):
    """Version 0: none were ever set."""

    version: int = 0
    routes: dict[str, Route] = {}


class RouteKeys(VersionedKey[StoredRoutes]):
    def __init__(self, redis: Redis, mesh_name: str) -> None:
        super().__init__(redis, mesh_name, "routes", StoredRoutes, dict[str, Route])

"""The routes that were set at run time, as one key of the mesh in Redis.

`{mesh}:routes` is a hash of `version` and `routes` (JSON). The greater version is the newer one;
versions are never behind the clock (in ms) of who makes them. Every gateway keeps what it has read
and offers it with each look, so that a Redis which has forgotten learns it again.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, NamedTuple

import msgspec
from redis.asyncio import Redis

from pagemesh.shared.routes import Route

_TIMEOUT_S: Final = 2.0

# KEYS: routes. ARGV: version and routes of the caller. Returns the newest version and its routes.
_NEWEST: Final = """
local held = tonumber(redis.call('HGET', KEYS[1], 'version') or 0)
if tonumber(ARGV[1]) > held then
  redis.call('HSET', KEYS[1], 'version', ARGV[1], 'routes', ARGV[2])
end
return redis.call('HMGET', KEYS[1], 'version', 'routes')
"""
# KEYS: routes. ARGV: the version to replace, the new version and its routes. Returns 1 if it did.
_REPLACE: Final = """
local held = tonumber(redis.call('HGET', KEYS[1], 'version') or 0)
if held ~= tonumber(ARGV[1]) then return 0 end
redis.call('HSET', KEYS[1], 'version', ARGV[2], 'routes', ARGV[3])
return 1
"""


class StoredRoutes(NamedTuple):
    """Version 0: none were ever set."""

    version: int = 0
    routes: dict[str, Route] = {}


class RouteKeys:
    """Raises redis.RedisError, OSError or TimeoutError when Redis is away."""

    def __init__(self, redis: Redis, mesh_name: str) -> None:
        self._redis = redis
        self._key = f"{mesh_name}:routes"

    async def newest(self, held: StoredRoutes) -> StoredRoutes:
        """What Redis holds, or `held` if that is newer, which Redis then holds too.

        Raises msgspec.DecodeError for what another version has written.
        """
        found: list[str | None] = await self._run(_NEWEST, held.version, _json(held.routes))
        version, routes = found
        if version is None or routes is None:
            return StoredRoutes()
        return StoredRoutes(int(version), msgspec.json.decode(routes, type=dict[str, Route]))

    async def replace(self, held: StoredRoutes, new: StoredRoutes) -> bool:
        """Whether `new` stands in Redis: it does not when `held` is no longer the newest."""
        arguments = held.version, new.version, _json(new.routes)
        return bool(await self._run(_REPLACE, *arguments))

    async def _run(self, script: str, *arguments: int | str) -> Any:
        async with asyncio.timeout(_TIMEOUT_S):
            # redis-py types eval for both its sync and async clients.
            return await self._redis.eval(script, 1, self._key, *arguments)  # type: ignore[misc, unused-ignore]


def _json(routes: dict[str, Route]) -> str:
    return msgspec.json.encode(routes).decode()

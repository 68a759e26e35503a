"""One document of the mesh in Redis, which every gateway follows and any may replace.

It is a hash of `version` and the document's name (JSON). The greater version is the newer one;
versions are never behind the clock (in ms) of who makes them. Every gateway keeps what it has read
and offers it with each look, so that a Redis which has forgotten learns it again.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, NamedTuple

from redis.asyncio import Redis

_TIMEOUT_S: Final = 2.0

# KEYS: document. ARGV: its name, version and text of the caller. Returns the newest of both.
_NEWEST: Final = """
local held = tonumber(redis.call('HGET', KEYS[1], 'version') or 0)
if tonumber(ARGV[2]) > held then
  redis.call('HSET', KEYS[1], 'version', ARGV[2], ARGV[1], ARGV[3])
end
return redis.call('HMGET', KEYS[1], 'version', ARGV[1])
"""
# KEYS: document. ARGV: its name, the version to replace, the new version and its text. Returns 1
# if it did.
_REPLACE: Final = """
local held = tonumber(redis.call('HGET', KEYS[1], 'version') or 0)
if held ~= tonumber(ARGV[2]) then return 0 end
redis.call('HSET', KEYS[1], 'version', ARGV[3], ARGV[1], ARGV[4])
return 1
"""


class Versioned(NamedTuple):
    """Version 0: there never was one."""

    version: int
    text: str


class VersionedKey:
    """The key `{mesh}:{name}`. Raises redis.RedisError, OSError or TimeoutError when Redis is
    away."""

    def __init__(self, redis: Redis, mesh_name: str, name: str) -> None:
        self._redis = redis
        self._key = f"{mesh_name}:{name}"
        self._name = name

    async def newest(self, held: Versioned) -> Versioned | None:
        """What Redis holds, or `held` if that is newer, which Redis then holds too."""
        found: list[str | None] = await self._run(_NEWEST, *held)
        version, text = found
        return None if version is None or text is None else Versioned(int(version), text)

    async def replace(self, held_version: int, new: Versioned) -> bool:
        """Whether `new` stands in Redis: not when `held_version` is no longer the newest."""
        return bool(await self._run(_REPLACE, held_version, *new))

    async def _run(self, script: str, *arguments: int | str) -> Any:
        async with asyncio.timeout(_TIMEOUT_S):
            # redis-py types eval for both its sync and async clients.
            return await self._redis.eval(script, 1, self._key, self._name, *arguments)  # type: ignore[misc, unused-ignore]

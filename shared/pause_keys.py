"""Whether the mesh admits requests: the document `pause` of the mesh in Redis."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec
from redis.asyncio import Redis

from pagemesh.shared.versioned_key import Versioned, VersionedKey

Mode = Literal["abort", "wait"]


class StoredPause(NamedTuple):
    """`mode` is None while requests are admitted: else what becomes of those that were. Version 0:
    nobody ever paused."""

    version: int = 0
    mode: Mode | None = None


class PauseKeys:
    """Raises redis.RedisError, OSError or TimeoutError when Redis is away."""

    def __init__(self, redis: Redis, mesh_name: str) -> None:
        self._key = VersionedKey(redis, mesh_name, "pause")

    async def newest(self, held: StoredPause) -> StoredPause:
        """What Redis holds, or `held` if that is newer, which Redis then holds too.

        Raises msgspec.MsgspecError for what another version has written.
        """
        found = await self._key.newest(_written(held))
        if found is None:
            return StoredPause()
        return StoredPause(found.version, msgspec.json.decode(found.text, type=Mode | None))

    async def replace(self, held: StoredPause, new: StoredPause) -> bool:
        """Whether `new` stands in Redis: it does not when `held` is no longer the newest."""
        return await self._key.replace(held.version, _written(new))


def _written(stored: StoredPause) -> Versioned:
    return Versioned(stored.version, msgspec.json.encode(stored.mode).decode())

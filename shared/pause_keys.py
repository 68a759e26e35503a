"""Whether the mesh admits requests: the document `pause` of the mesh in Redis."""

from __future__ import annotations

from typing import Literal, NamedTuple

from redis.asyncio import Redis

from pagemesh.shared.versioned_key import VersionedKey

Mode = Literal["abort", "wait"]


class StoredPause(NamedTuple):
    """`mode` is None while requests are admitted: else what becomes of those that were. Version 0:
    nobody ever paused."""

    version: int = 0
    mode: Mode | None = None


class PauseKeys(VersionedKey[StoredPause]):
    def __init__(self, redis: Redis, mesh_name: str) -> None:
        super().__init__(redis, mesh_name, "pause", StoredPause, Mode | None)

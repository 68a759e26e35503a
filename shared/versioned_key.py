"""One document of the mesh in Redis, which every gateway follows and any may replace.

It is a hash of `version` and the document's name (JSON). The greater version is the newer one;
versions are never behind the clock (in ms) of who makes them. Every gateway keeps what it has read
and offers it with each look, so that a Redis which has forgotten learns it again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import msgspec
from redis.asyncio import Redis

_TIMEOUT_S: Final = 2.0
# Each is lost to another change at the same moment.
_MAX_TRIES: Final = 8

S = TypeVar("S", bound=tuple[int, Any])

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


class VersionedKey(Generic[S]):
    """The key `{mesh}:{name}`. Raises redis.RedisError, OSError or TimeoutError when Redis is away,
    msgspec.MsgspecError for what another version has written."""

    def __init__(
        self, redis: Redis, mesh_name: str, name: str, kind: Callable[..., S], document: Any
    ) -> None:
        """`kind` makes a pair of a version (0, by default: there never was one) and a document,
        whose type is `document`."""
        self._redis = redis
        self._key = f"{mesh_name}:{name}"
        self._name = name
        self._kind = kind
        self._decoder = msgspec.json.Decoder(document)

    async def newest(self, held: S) -> S:
        """What Redis holds, or `held` if that is newer, which Redis then holds too."""
        found: list[str | None] = await self._run(_NEWEST, *_written(held))
        version, text = found
        if version is None or text is None:
            return self._kind()
        return self._kind(int(version), self._decoder.decode(text))

    async def change(self, held: S, edit: Callable[[S], Any]) -> S | None:
        """Replace the newest by what `edit` makes of it; None when others were always first. What
        `edit` raises ends it."""
        for _ in range(_MAX_TRIES):
            newest = await self.newest(held)
            version = max(newest[0] + 1, time.time_ns() // 10**6)
            new = self._kind(version, edit(newest))
            if await self._run(_REPLACE, newest[0], *_written(new)):
                return new
        return None

    async def _run(self, script: str, *arguments: int | str) -> Any:
        async with asyncio.timeout(_TIMEOUT_S):
            # redis-py types eval for both its sync and async clients.
            return await self._redis.eval(script, 1, self._key, self._name, *arguments)  # type: ignore[misc, unused-ignore]


def _written(stored: tuple[int, Any]) -> tuple[int, str]:
    version, document = stored
    return version, msgspec.json.encode(document).decode()

"""Requests to be cancelled wherever they are: gateways tell each other through Redis.

`{mesh}:cancels` is a stream of what was asked for, bounded to about MAX_KEPT entries; every gateway
follows it. Who finds one of the ids says so in the list `{mesh}:cancelled:{nonce}`, which lapses.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final, NamedTuple

import msgspec
from redis.asyncio import Redis

MAX_KEPT: Final = 1024
FOLLOW_S: Final = 5.0
"""One look at the stream waits so long for news."""
_CONFIRMED_TTL_MS: Final = 10_000
_TIMEOUT_S: Final = 2.0


class Cancelling(NamedTuple):
    """Ids of requests, and the owner who asks, or None for one who may end them all."""

    nonce: str
    request_ids: list[str]
    caller: str | None


class CancelKeys:
    """Raises redis.RedisError, OSError or TimeoutError when Redis is away."""

    def __init__(self, redis: Redis, mesh_name: str) -> None:
        self._redis = redis
        self._stream = f"{mesh_name}:cancels"
        self._confirmed = f"{mesh_name}:cancelled:"

    async def tell(self, cancelling: Cancelling) -> None:
        entry: Any = {"cancelling": msgspec.json.encode(cancelling)}
        async with asyncio.timeout(_TIMEOUT_S):
            await self._redis.xadd(self._stream, entry, maxlen=MAX_KEPT)

    async def newest(self) -> str:
        """The place to follow the stream from."""
        async with asyncio.timeout(_TIMEOUT_S):
            entries = await self._redis.xrevrange(self._stream, count=1)
        return str(entries[0][0]) if entries else "0"

    async def follow(self, place: str) -> list[tuple[str, Cancelling]]:
        """What was told behind `place`, with the place of each; after FOLLOW_S nothing.

        Raises msgspec.MsgspecError for what another version has written.
        """
        async with asyncio.timeout(FOLLOW_S + _TIMEOUT_S):
            found: Any = await self._redis.xread({self._stream: place}, block=int(FOLLOW_S * 1000))
        entries = [entry for _, entries in found for entry in entries]
        return [
            (place, msgspec.json.decode(fields["cancelling"], type=Cancelling))
            for place, fields in entries
        ]

    async def confirm(self, nonce: str, request_ids: list[str]) -> None:
        """Tell who asked that these were here, and are cancelled."""
        async with asyncio.timeout(_TIMEOUT_S), self._redis.pipeline(transaction=True) as pipe:
            pipe.rpush(self._confirmed + nonce, *request_ids)
            pipe.pexpire(self._confirmed + nonce, _CONFIRMED_TTL_MS)
            await pipe.execute()

    async def confirmed(self, nonce: str, request_ids: set[str], patience_s: float) -> set[str]:
        """Those of `request_ids` that were confirmed within `patience_s`; at once when all are."""
        found: set[str] = set()
        ends_s = time.monotonic() + patience_s
        while found < request_ids and (left_s := ends_s - time.monotonic()) > 0:
            async with asyncio.timeout(left_s + _TIMEOUT_S):
                popped: Any = await self._redis.blpop([self._confirmed + nonce], timeout=left_s)  # type: ignore[misc, unused-ignore]
            if popped is not None:
                found.add(popped[1])
        return found

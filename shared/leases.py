"""Leases: which scheduler may command a worker, as keys in Redis.

The key `{mesh}:lease:{worker}` holds "TERM HOLDER" and is gone LEASE_TTL_S after its last renewal.
Without a holder it says that the lease was given up, so that nobody waits for it to lapse. Terms
come from one counter of the mesh that is never behind Redis's clock (in ms): they grow even if
Redis forgets what it held. What a lease is worth is decided by the worker, which obeys the highest
term it has seen, and no other scheduler while the link of its own lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from redis.asyncio import Redis

LEASE_TTL_S: Final = 3.0
_TIMEOUT_S: Final = 2.0
_TTL_MS: Final = int(LEASE_TTL_S * 1000)

# KEYS: lease, counter. ARGV: holder, TTL. Returns the term, or nil when somebody holds the lease.
_CLAIM: Final = """
local held = redis.call('GET', KEYS[1])
if held and not string.match(held, ' $') then return nil end
local now = redis.call('TIME')
local clock_ms = now[1] * 1000 + math.floor(now[2] / 1000)
local term = math.max(tonumber(redis.call('GET', KEYS[2]) or 0) + 1, clock_ms)
local text = string.format('%.0f', term)
redis.call('SET', KEYS[2], text)
redis.call('SET', KEYS[1], text .. ' ' .. ARGV[1], 'PX', ARGV[2])
return term
"""
# KEYS: leases. ARGV: TTL, then what each should say. Another holder's lease stays as it is.
_RENEW: Final = """
for i, key in ipairs(KEYS) do
  local held = redis.call('GET', key)
  if not held or held == ARGV[i + 1] or string.match(held, ' $') then
    redis.call('SET', key, ARGV[i + 1], 'PX', ARGV[1])
  end
end
"""
# KEYS: lease. ARGV: what it says if it is ours, what it shall say then, TTL.
_RELEASE: Final = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3]) end
"""


class Lease(NamedTuple):
    """Of one worker. `holder` is a scheduler's instance id, or "" when the lease was given up."""

    term: int
    holder: str

    def text(self) -> str:
        return f"{self.term} {self.holder}"


class LeaseKeys:
    """The leases of one mesh. Every method raises redis.RedisError, OSError or TimeoutError when
    Redis is away."""

    def __init__(self, redis: Redis, mesh_name: str) -> None:
        self._redis = redis
        self._mesh = mesh_name

    async def read(self, workers: Iterable[str]) -> dict[str, Lease]:
        """By worker, of those that have one."""
        names = list(workers)
        if not names:
            return {}
        async with asyncio.timeout(_TIMEOUT_S):
            values = await self._redis.mget(map(self._key, names))
        return {
            name: _lease(str(value)) for name, value in zip(names, values, strict=True) if value
        }

    async def claim(self, worker: str, holder: str) -> Lease | None:
        """A lease of a new term; None when another holds one."""
        counter = f"{self._mesh}:lease_term"
        term = await self._eval(_CLAIM, [self._key(worker), counter], [holder, _TTL_MS])
        return None if term is None else Lease(term, holder)

    async def renew(self, leases: Mapping[str, Lease]) -> None:
        """Hold `leases` for another LEASE_TTL_S, those that lapsed or were given up as well."""
        if leases:
            texts = [lease.text() for lease in leases.values()]
            await self._eval(_RENEW, [*map(self._key, leases)], [_TTL_MS, *texts])

    async def release(self, worker: str, lease: Lease) -> None:
        """Give `lease` up; a younger one is left alone."""
        freed = lease._replace(holder="")
        await self._eval(_RELEASE, [self._key(worker)], [lease.text(), freed.text(), _TTL_MS])

    async def _eval(self, script: str, keys: list[str], arguments: list[str | int]) -> Any:
        async with asyncio.timeout(_TIMEOUT_S):
            # redis-py types eval for both its sync and async clients.
            return await self._redis.eval(script, len(keys), *keys, *arguments)  # type: ignore[misc, unused-ignore]

    def _key(self, worker: str) -> str:
        return f"{self._mesh}:lease:{worker}"


def _lease(text: str) -> Lease:
    term, _, holder = text.partition(" ")
    return Lease(int(term), holder)

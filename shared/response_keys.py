"""Stored responses, as keys in Redis: what any gateway of the mesh needs to know of them.

`{mesh}:stored:response:{id}` is a hash of a response: `status`, `object` (JSON), `items` (JSON, the
input), `previous` (JSON, the ids of the responses before it), `context_bytes` and `owner`.
`…:events` is the list of the stream events of one that runs in the background, the place of each
being its sequence number. Both go a time after their last use. `{mesh}:stored:responses` orders
them by when that will be, and `{mesh}:stored:response_bytes` says how large each is (and all, in
the field without a name): beyond a limit those that would go first go. `{mesh}:response_lease:{id}`
is held by the gateway that runs one in the background.

The scripts name keys that their arguments do not, so this wants one Redis, not a cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from redis.asyncio import Redis

STORED: Final = "stored"
"""The second part of the names of keys that are worth keeping on disk."""
LEASE_TTL_S: Final = 5.0
EVENTS_TTL_S: Final = 3600.0
MAX_EVENTS_READ: Final = 256
_TIMEOUT_S: Final = 2.0
_FIELDS: Final = ("status", "object", "items", "previous", "context_bytes", "owner")

# KEYS: index, sizes. ARGV: the keys' prefix.
_DROP: Final = """
local function drop(index, sizes, prefix, id)
  redis.call('HINCRBY', sizes, '', -(redis.call('HGET', sizes, id) or 0))
  redis.call('HDEL', sizes, id)
  redis.call('ZREM', index, id)
  redis.call('DEL', prefix .. id .. ':events')
  return redis.call('DEL', prefix .. id)
end
"""
# KEYS: index, sizes, response, events, lease. ARGV: prefix, id, whether it is new, TTL and that of
# events, TTL of the lease or 0 for none, bytes that it grows by, most bytes of all, how many values
# follow, the place of the first event, fields and values, events. Returns whether it was written:
# what has ended, or is gone, is not. Events that were written before, of which the answer was lost,
# are not written again.
_WRITE: Final = (
    _DROP
    + """
local index, sizes, prefix, id = KEYS[1], KEYS[2], ARGV[1], ARGV[2]
local status = redis.call('HGET', KEYS[3], 'status')
if ARGV[3] == '0' and status ~= 'queued' and status ~= 'in_progress' then return 0 end
local first_event = 11 + tonumber(ARGV[9])
for i = 11, first_event - 1, 2 do redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 1]) end
local n_written = math.max(0, redis.call('LLEN', KEYS[4]) - tonumber(ARGV[10]))
for i = first_event + n_written, #ARGV do redis.call('RPUSH', KEYS[4], ARGV[i]) end
redis.call('PEXPIRE', KEYS[3], ARGV[4])
redis.call('PEXPIRE', KEYS[4], ARGV[5])
if tonumber(ARGV[6]) > 0 then redis.call('SET', KEYS[5], '', 'PX', ARGV[6])
else redis.call('DEL', KEYS[5]) end

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', index, now_ms + ARGV[4], id)
redis.call('HINCRBY', sizes, id, ARGV[7])
redis.call('HINCRBY', sizes, '', ARGV[7])
for _, lapsed in ipairs(redis.call('ZRANGE', index, '-inf', now_ms, 'BYSCORE', 'LIMIT', 0, 64)) do
  drop(index, sizes, prefix, lapsed)
end
while tonumber(redis.call('HGET', sizes, '')) > tonumber(ARGV[8]) do
  local oldest = redis.call('ZRANGE', index, 0, 1)
  local other = oldest[1] == id and oldest[2] or oldest[1]
  if other == id or not other then break end
  drop(index, sizes, prefix, other)
end
return 1
"""
)
# KEYS: index, sizes, lease. ARGV: prefix, id. Returns whether there was one.
_DELETE: Final = (
    _DROP
    + """
redis.call('DEL', KEYS[3])
return drop(KEYS[1], KEYS[2], ARGV[1], ARGV[2])
"""
)


class StoredResponse(NamedTuple):
    """`object` and `items` are JSON. `previous`: the ids of those before it, the oldest first.
    `held`: whether a gateway holds its lease. `owner`: for whom it is kept.
    `context_bytes`: the size of those before it."""

    status: str
    object: str
    items: str
    previous: list[str]
    held: bool = False
    owner: str = ""
    context_bytes: int = 0


class EventLog(NamedTuple):
    """What a look at the events of a response found: the status it had, whether it was held, and
    some events."""

    status: str | None
    held: bool
    events: list[str]


class ResponseLimits(NamedTuple):
    """How long responses are kept after their last use, and how many bytes of them in all."""

    ttl_s: float
    max_bytes: int


class ResponseKeys:
    """Raises redis.RedisError, OSError or TimeoutError when Redis is away."""

    def __init__(self, redis: Redis, mesh_name: str) -> None:
        self._redis = redis
        self._prefix = f"{mesh_name}:{STORED}:response:"
        self._index = f"{mesh_name}:{STORED}:responses"
        self._sizes = f"{mesh_name}:{STORED}:response_bytes"
        self._leases = f"{mesh_name}:response_lease:"

    async def add(
        self,
        response_id: str,
        stored: StoredResponse,
        limits: ResponseLimits,
        events: Sequence[bytes] = (),
    ) -> None:
        """A new one, whose lease is held if `stored` says so."""
        fields = {
            "status": stored.status,
            "object": stored.object,
            "items": stored.items,
            "previous": msgspec.json.encode(stored.previous).decode(),
            "context_bytes": str(stored.context_bytes),
            "owner": stored.owner,
        }
        await self._write(
            response_id, limits, fields, events, first_event=0, new=True, holds=stored.held
        )

    async def update(
        self,
        response_id: str,
        limits: ResponseLimits,
        *,
        status: str | None = None,
        body: str | None = None,
        events: Sequence[bytes] = (),
        first_event: int = 0,
        holds: bool,
    ) -> bool:
        """Whether it was written: one that has ended, or is gone, stays as it is. `body`: its new
        object. `first_event`: the sequence number of the first of `events`. `holds`: hold its lease
        on, or else let it go."""
        given = {"status": status, "object": body}
        fields = {name: value for name, value in given.items() if value is not None}
        return await self._write(
            response_id, limits, fields, events, first_event=first_event, new=False, holds=holds
        )

    async def _write(
        self,
        response_id: str,
        limits: ResponseLimits,
        fields: Mapping[str, str],
        events: Sequence[bytes],
        *,
        first_event: int,
        new: bool,
        holds: bool,
    ) -> bool:
        values = [text for pair in fields.items() for text in pair]
        # What an object replaces is counted again: less is never held than is counted.
        grows_bytes = sum(map(len, events)) + sum(len(value.encode()) for value in values)
        key = self._prefix + response_id
        keys = [self._index, self._sizes, key, f"{key}:events", self._leases + response_id]
        ttl_ms = int(limits.ttl_s * 1000)
        events_ttl_ms = min(ttl_ms, int(EVENTS_TTL_S * 1000))
        lease_ms = int(LEASE_TTL_S * 1000) if holds else 0
        limits_of_it = [ttl_ms, events_ttl_ms, lease_ms, grows_bytes, limits.max_bytes]
        head = [self._prefix, response_id, int(new), *limits_of_it, len(values), first_event]
        return bool(await self._run(_WRITE, keys, [*head, *values, *events]))

    async def read(
        self, response_ids: Iterable[str], limits: ResponseLimits
    ) -> list[StoredResponse | None]:
        """In the order of the ids. Being read is a use."""
        ids = list(response_ids)
        ttl_ms = int(limits.ttl_s * 1000)
        async with asyncio.timeout(_TIMEOUT_S), self._redis.pipeline(transaction=False) as pipe:
            pipe.time()
            for each in ids:
                pipe.hmget(self._prefix + each, _FIELDS)
                pipe.exists(self._leases + each)
                pipe.pexpire(self._prefix + each, ttl_ms)
            (seconds, microseconds), *found = await pipe.execute()
            lapses_s = seconds + microseconds / 1e6 + limits.ttl_s
            scores = dict.fromkeys(ids, lapses_s * 1000)
            if scores:
                await self._redis.zadd(self._index, scores, xx=True)
        return [_stored(*found[i : i + 2]) for i in range(0, len(found), 3)]

    async def events(self, response_id: str, start: int) -> EventLog:
        """From the sequence number `start` on, MAX_EVENTS_READ at most. With fewer of one that has
        ended, those are the last."""
        key = self._prefix + response_id
        async with asyncio.timeout(_TIMEOUT_S), self._redis.pipeline(transaction=True) as pipe:
            pipe.hget(key, "status")
            pipe.exists(self._leases + response_id)
            pipe.lrange(f"{key}:events", start, start + MAX_EVENTS_READ - 1)
            status, held, events = await pipe.execute()
        return EventLog(status, bool(held), events)

    async def delete(self, response_id: str) -> bool:
        """Whether there was one."""
        keys = [self._index, self._sizes, self._leases + response_id]
        return bool(await self._run(_DELETE, keys, [self._prefix, response_id]))

    async def _run(self, script: str, keys: list[str], arguments: list[Any]) -> Any:
        async with asyncio.timeout(_TIMEOUT_S):
            # redis-py types eval for both its sync and async clients.
            return await self._redis.eval(script, len(keys), *keys, *arguments)  # type: ignore[misc, unused-ignore]


def _stored(values: list[str | None], held: int) -> StoredResponse | None:
    status, body, items, previous, context_bytes, owner = values
    if status is None or body is None or items is None or previous is None:
        return None
    ids = msgspec.json.decode(previous, type=list[str])
    size_bytes = int(context_bytes or 0)
    return StoredResponse(status, body, items, ids, bool(held), owner or "", size_bytes)

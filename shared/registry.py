"""Who exists: heartbeat keys with addresses in Redis.

Each instance owns the key `{mesh}:instance:{service}:{id}`, rewritten every HEARTBEAT_S and gone
KEY_TTL_S after the last beat; the set `{mesh}:instances:{service}` lists the ids. What it has to do
beats beside it, in `{mesh}:load:{service}:{id}`: for people and their tools, since services learn
of each other's load over their links. The counter `{mesh}:changes:{service}` grows with newcomers
and leavers, so that a look costs little while there are none; keys that lapse are noticed once a
second. Redis is off the request path: when it is away, announcing and watching go on quietly until
it is back, and links already open stay open.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, NamedTuple

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from pagemesh.shared.cancel_keys import CancelKeys
from pagemesh.shared.leases import LeaseKeys
from pagemesh.shared.pause_keys import PauseKeys
from pagemesh.shared.prefix_index import PrefixIndex
from pagemesh.shared.response_keys import ResponseKeys
from pagemesh.shared.route_keys import RouteKeys
from pagemesh.shared.wire import PROTOCOL

HEARTBEAT_S: Final = 1.0
KEY_TTL_S: Final = 3.0
WATCH_PERIOD_S: Final = 0.25
WHOLE_LOOK_S: Final = 1.0
"""A key that lapses is no change that anybody counts."""
REDIS_TIMEOUT_S: Final = 2.0
_TTL_MS: Final = int(KEY_TTL_S * 1000)
MASK: Final = "********"
AWAY: Final = (RedisError, OSError, TimeoutError)
"""What a call to Redis raises when it cannot be reached."""

log = structlog.get_logger(__name__)


class Instance(NamedTuple):
    """One running process of a service. `address` is host:port of its link endpoint; `models` are
    the names of the models that it serves, of a worker and of a tokenizer service.

    Another version may append fields, so `protocol` keeps its place."""

    service: str
    instance_id: str
    address: str
    epoch: int
    protocol: int = PROTOCOL
    models: list[str] = []


class Load(NamedTuple):
    """Of one instance: what it has in flight (choices, requests or rows, as its ledger counts
    them), and how much of it can run at a time, where that is bounded."""

    in_flight: int = 0
    capacity: int | None = None


class _Look(NamedTuple):
    """What a look at all keys of a service found."""

    changes: str | bytes | None
    instances: list[Instance]
    at_s: float


class Registry:
    """The registry keys of one mesh. Owner of its Redis connection: call `close`."""

    def __init__(self, redis_url: str, mesh_name: str) -> None:
        # No socket_timeout: on Python 3.11 redis-py enforces it with asyncio.wait_for, which may
        # swallow a cancellation, and a service would never stop. `asyncio.timeout` does not.
        self._redis = Redis.from_url(
            redis_url,
            socket_timeout=None,
            socket_connect_timeout=REDIS_TIMEOUT_S,
            decode_responses=True,
        )
        self.leases = LeaseKeys(self._redis, mesh_name)
        self.prefix_index = PrefixIndex(self._redis, mesh_name)
        self.routes = RouteKeys(self._redis, mesh_name)
        self.pause = PauseKeys(self._redis, mesh_name)
        self.cancels = CancelKeys(self._redis, mesh_name)
        self.responses = ResponseKeys(self._redis, mesh_name)
        self._mesh = mesh_name
        self._away = False
        self._looks: dict[str, _Look] = {}
        self._passed_over: dict[str, set[str]] = {}

    @property
    def away(self) -> bool:
        """Whether the last call to Redis failed."""
        return self._away

    async def ping(self) -> None:
        """Raises redis.RedisError or OSError when Redis cannot be reached."""
        async with asyncio.timeout(REDIS_TIMEOUT_S):
            # redis-py types ping for both its sync and async clients.
            await self._redis.ping()  # type: ignore[misc, unused-ignore]

    async def announce(self, instance: Instance, load: Callable[[], Load] = Load) -> None:
        """Keep `instance`, and what `load` says of it, announced until cancelled."""
        while True:
            await self._beat(instance, load())
            await asyncio.sleep(HEARTBEAT_S)

    async def withdraw(self, instance: Instance) -> None:
        """Tell the mesh that `instance` takes no new work. Silent when Redis is away."""
        try:
            async with (
                asyncio.timeout(REDIS_TIMEOUT_S),
                self._redis.pipeline(transaction=True) as pipe,
            ):
                pipe.delete(self._key(instance.service, instance.instance_id))
                pipe.delete(self._load_key(instance.service, instance.instance_id))
                pipe.srem(self._ids_key(instance.service), instance.instance_id)
                pipe.incr(self._changes_key(instance.service))
                await pipe.execute()
        except AWAY as error:
            self._note_away(error)

    async def instances(self, service: str) -> list[Instance]:
        """The live instances of `service` that speak our protocol, by instance id.

        Raises redis.RedisError or OSError when Redis is away.
        """
        async with asyncio.timeout(REDIS_TIMEOUT_S):
            values = await self._values(service)
        told = self._passed_over.setdefault(service, set())
        told.intersection_update(values)
        found = [self._read(name, value, told) for name, value in values.items()]
        return [instance for instance in found if instance is not None]

    async def loads(self, service: str) -> dict[str, Load]:
        """By instance id, of those that beat now. Raises redis.RedisError or OSError when Redis is
        away."""
        async with asyncio.timeout(REDIS_TIMEOUT_S):
            names = list(await self._values(service))
            values = await self._redis.mget([self._load_key(service, name) for name in names])
        found = zip(names, values, strict=True)
        return {name: msgspec.json.decode(value, type=Load) for name, value in found if value}

    async def latest(self, service: str) -> list[Instance]:
        """As `instances`, for those who look often: a key that has lapsed may be among them for
        WHOLE_LOOK_S."""
        async with asyncio.timeout(REDIS_TIMEOUT_S):
            changes = await self._redis.get(self._changes_key(service))
        now_s, look = asyncio.get_running_loop().time(), self._looks.get(service)
        if look is None or look.changes != changes or now_s - look.at_s >= WHOLE_LOOK_S:
            look = _Look(changes, await self.instances(service), now_s)
            self._looks[service] = look
        return look.instances

    def _read(self, name: str, value: str, told: set[str]) -> Instance | None:
        """The instance in `value`; None, and one log line, when we cannot speak with it."""
        try:
            instance = _instance(value)
        except msgspec.DecodeError as error:
            _pass_over(told, name, f"its registry key is no instance: {error}")
            return None
        if instance.protocol != PROTOCOL:
            _pass_over(told, name, f"protocol {instance.protocol} is not {PROTOCOL}")
            return None
        return instance

    async def _values(self, service: str) -> dict[str, str]:
        """The live keys' contents, by instance id. Ids of lapsed keys leave the set."""
        ids = await self._redis.smembers(self._ids_key(service))  # type: ignore[misc, unused-ignore]
        names = sorted(map(str, ids))
        if not names:
            return {}
        values = await self._redis.mget([self._key(service, name) for name in names])
        found = dict(zip(names, values, strict=True))
        expired = [name for name, value in found.items() if value is None]
        if expired:
            await self._redis.srem(self._ids_key(service), *expired)  # type: ignore[misc, unused-ignore]
        return {name: str(value) for name, value in found.items() if value is not None}

    async def watch(self, service: str) -> AsyncIterator[list[Instance]]:
        """The live instances of `service`, again whenever they changed. Never raises for Redis."""
        last: list[Instance] | None = None
        while True:
            try:
                current = await self.latest(service)
            except AWAY as error:
                self._note_away(error)
            else:
                self._note_back()
                if current != last:
                    last = current
                    yield current
            await asyncio.sleep(WATCH_PERIOD_S)

    async def close(self) -> None:
        await self._redis.aclose()

    async def _beat(self, instance: Instance, load: Load) -> None:
        try:
            async with (
                asyncio.timeout(REDIS_TIMEOUT_S),
                self._redis.pipeline(transaction=True) as pipe,
            ):
                key = self._key(instance.service, instance.instance_id)
                load_key = self._load_key(instance.service, instance.instance_id)
                pipe.set(load_key, msgspec.json.encode(load), px=_TTL_MS)
                pipe.set(key, msgspec.json.encode(instance), px=_TTL_MS)
                pipe.sadd(self._ids_key(instance.service), instance.instance_id)
                *_, is_new = await pipe.execute()
            if is_new:
                await self._redis.incr(self._changes_key(instance.service))
        except AWAY as error:
            self._note_away(error)
        else:
            self._note_back()

    def _note_away(self, error: BaseException) -> None:
        if not self._away:
            log.warning("redis_away", error=str(error), effect="newcomers are not found meanwhile")
        self._away = True

    def _note_back(self) -> None:
        if self._away:
            log.info("redis_back")
        self._away = False

    def _key(self, service: str, instance_id: str) -> str:
        return f"{self._mesh}:instance:{service}:{instance_id}"

    def _load_key(self, service: str, instance_id: str) -> str:
        return f"{self._mesh}:load:{service}:{instance_id}"

    def _changes_key(self, service: str) -> str:
        return f"{self._mesh}:changes:{service}"

    def _ids_key(self, service: str) -> str:
        return f"{self._mesh}:instances:{service}"


def _instance(value: str) -> Instance:
    """Raises msgspec.DecodeError. Fields beyond ours are another version's, and left alone; so are
    those behind another protocol."""
    fields = msgspec.json.decode(value, type=list[Any])
    n_common = Instance._fields.index("protocol") + 1
    ours = fields[n_common - 1 : n_common] == [PROTOCOL]
    return msgspec.convert(fields[: len(Instance._fields) if ours else n_common], Instance)


def _pass_over(told: set[str], name: str, reason: str) -> None:
    if name not in told:
        log.warning("instance_passed_over", instance=name, reason=reason)
    told.add(name)


def masked_url(url: str) -> str:
    """`url` without its password, `redis://user:password@host` or `unix://…?password=…`."""
    url = re.sub(r"(://[^:/@\s]*:)[^@/\s]+@", rf"\1{MASK}@", url)
    return re.sub(r"([?&](?:ssl_)?password=)[^&\s\"]+", rf"\1{MASK}", url)

"""The responses that the mesh keeps, for any of its gateways."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import msgspec
import structlog

from pagemesh.gateway.metrics import GatewayMetrics
from pagemesh.gateway.offload import Offload
from pagemesh.gateway.openai.answer import encode_json
from pagemesh.gateway.openai.errors import bad
from pagemesh.gateway.openai.responses import objects
from pagemesh.gateway.openai.responses.items import REFERENCE, RESPONSE_ID, Item, home_of
from pagemesh.gateway.openai.responses.objects import Object
from pagemesh.shared.errors import RequestError
from pagemesh.shared.registry import AWAY
from pagemesh.shared.response_keys import EventLog, ResponseKeys, ResponseLimits, StoredResponse
from pagemesh.shared.settings import GatewaySettings

MAX_TURNS: Final = 1024
MAX_ID_CHARS: Final = 128

log = structlog.get_logger(__name__)


class Context(NamedTuple):
    """What was said before a response: by which responses, the oldest first, and the items."""

    previous: list[str] = []
    items: list[Item] = []
    size_bytes: int = 0


class Draft(NamedTuple):
    """A response that is being made: what is kept of it beside its object."""

    id: str
    owner: str
    items: list[Item]
    context: Context

    def stored(self, status: str, body: bytes, *, held: bool = False) -> StoredResponse:
        return StoredResponse(
            status=status,
            object=body.decode(),
            items=encode_json(self.items).decode(),
            previous=self.context.previous,
            held=held,
            owner=self.owner,
            context_bytes=self.context.size_bytes,
        )


class _Ended(msgspec.Struct):
    status: str


class ResponseStore:
    """Of each owner there is only what is his own. Reading and changing raise RequestError: 404 for
    what is not there, 503 with Redis away."""

    def __init__(
        self,
        keys: ResponseKeys,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
        offload: Offload,
    ) -> None:
        self._keys = keys
        self._offload = offload
        self._max_context_bytes = settings.max_body_bytes
        self._limits = ResponseLimits(settings.response_ttl_s, settings.max_stored_bytes)
        self._max_response_bytes = settings.max_response_bytes
        self._metrics = metrics

    async def get(self, owner: str, response_id: str) -> StoredResponse:
        """One that no gateway runs any more, though it has not ended, has failed."""
        [found] = await self._read(owner, [response_id])
        if found is None:
            raise missing(response_id)
        if found.status in objects.ACTIVE and not found.held:
            return await self._fail_lost(owner, response_id, found)
        return found

    async def _fail_lost(
        self, owner: str, response_id: str, found: StoredResponse
    ) -> StoredResponse:
        gone = RequestError(
            "The gateway that ran this response in the background is gone. Ask anew.", status=500
        )
        body = encode_json(objects.failed(msgspec.json.decode(found.object), gone)).decode()
        with redis_away():
            written = await self._keys.update(
                response_id, self._limits, status=objects.FAILED, body=body, holds=False
            )
        if written:
            log.warning("background_response_lost", response_id=response_id)
            return found._replace(status=objects.FAILED, object=body)
        return await self.get(owner, response_id)

    async def cancel(self, owner: str, response_id: str) -> StoredResponse:
        """It is cancelled, unless it has ended; whoever runs it will notice."""
        found = await self.get(owner, response_id)
        if found.status not in objects.ACTIVE:
            return found
        body = encode_json(objects.cancelled(msgspec.json.decode(found.object))).decode()
        with redis_away():
            await self._keys.update(
                response_id, self._limits, status=objects.CANCELLED, body=body, holds=False
            )
        return await self.get(owner, response_id)

    async def delete(self, owner: str, response_id: str) -> None:
        await self.get(owner, response_id)
        with redis_away():
            if not await self._keys.delete(response_id):
                raise missing(response_id)

    async def events(self, response_id: str, start: int) -> EventLog:
        """Raises as redis does: whoever follows events goes on once it is back."""
        return await self._keys.events(response_id, start)

    # -- what was said ----------------------------------------------------------------------------

    async def context(self, owner: str, response_id: str | None) -> Context:
        """Of a response that follows `response_id`. Raises RequestError (400)."""
        if response_id is None:
            return Context()
        [last] = await self._previous(owner, [response_id])
        size_bytes = last.context_bytes + len(last.object) + len(last.items)
        self._check_last(last, size_bytes)
        before = await self._previous(owner, last.previous)
        items = await self._items(size_bytes, [*before, last])
        return Context([*last.previous, response_id], items, size_bytes)

    def _check_last(self, last: StoredResponse, size_bytes: int) -> None:
        if last.status not in (objects.COMPLETED, objects.INCOMPLETE):
            raise bad("previous_response_id", f"is of a response that is {last.status}")
        if len(last.previous) >= MAX_TURNS:
            raise bad("previous_response_id", f"has {MAX_TURNS} responses before it, the most")
        if size_bytes > self._max_context_bytes:
            raise bad(
                "previous_response_id",
                f"is of a conversation of {size_bytes} bytes; {self._max_context_bytes} are taken",
            )

    async def _items(self, size_bytes: int, responses: list[StoredResponse]) -> list[Item]:
        return await self._offload.run(size_bytes, lambda: list(_items(responses)))

    async def _previous(self, owner: str, ids: Sequence[str]) -> list[StoredResponse]:
        found = await self._read(owner, ids)
        for each, response in zip(ids, found, strict=True):
            if response is None:
                raise RequestError(
                    f"Previous response with id '{each[:MAX_ID_CHARS]}' not found: it was not "
                    "stored, is deleted, or has not been used for too long.",
                    code="previous_response_not_found",
                    param="previous_response_id",
                )
        return [response for response in found if response is not None]

    async def resolved(self, owner: str, items: list[Item]) -> list[Item]:
        """References replaced by what they refer to. Raises RequestError (400)."""
        wanted = {i: each["id"] for i, each in enumerate(items) if each["type"] == REFERENCE}
        if not wanted:
            return items
        homes = {home for each in wanted.values() if (home := home_of(each)) is not None}
        stored = [each for each in await self._read(owner, sorted(homes)) if each is not None]
        known = {item["id"]: item for item in _items(stored)}
        for i, item_id in wanted.items():
            if item_id not in known:
                raise bad(f"input[{i}].id", f"{item_id[:MAX_ID_CHARS]!r} is no item that is stored")
        return [known[wanted[i]] if i in wanted else each for i, each in enumerate(items)]

    async def said(self, owner: str, response_id: str) -> list[Item]:
        """All items that the response was made of, the oldest first."""
        found = await self.get(owner, response_id)
        before = [each for each in await self._read(owner, found.previous) if each is not None]
        items: list[Item] = msgspec.json.decode(found.items)
        return [*await self._items(found.context_bytes, before), *items]

    async def _read(self, owner: str, ids: Sequence[str]) -> list[StoredResponse | None]:
        ours = [each for each in ids if RESPONSE_ID.fullmatch(each)]
        with redis_away():
            read = await self._keys.read(ours, self._limits)
        pairs = zip(ours, read, strict=True)
        found = {each: one for each, one in pairs if one is not None and one.owner == owner}
        return [found.get(each) for each in ids]

    # -- what is made -----------------------------------------------------------------------------

    def check_kept(self, draft: Draft, body: bytes) -> None:
        """Raises RequestError (400) for what is too large to be kept."""
        size_bytes = len(body) + len(encode_json(draft.items))
        if size_bytes > self._max_response_bytes:
            raise bad(
                "store",
                f"takes responses of at most {self._max_response_bytes} bytes, their input "
                f"included; this one has {size_bytes}",
            )

    async def keep(self, draft: Draft, body: bytes) -> bytes:
        """Store a response that has ended. What cannot be kept is answered all the same, and says
        so: its `store` is false then."""
        stored = draft.stored(msgspec.json.decode(body, type=_Ended).status, body)
        reason = "it is too large"
        if len(body) + len(stored.items) <= self._max_response_bytes:
            try:
                await self._keys.add(draft.id, stored, self._limits)
                return body
            except AWAY as error:
                reason = f"Redis is away: {error}"
        self._metrics.responses_not_stored.inc()
        log.warning("response_not_stored", response_id=draft.id, reason=reason)
        return encode_json(msgspec.json.decode(body, type=dict[str, Any]) | {"store": False})

    async def begin(self, draft: Draft, begun: Object, events: Sequence[bytes]) -> None:
        """Store a response that this gateway will run in the background."""
        stored = draft.stored(objects.QUEUED, encode_json(begun), held=True)
        with redis_away():
            await self._keys.add(draft.id, stored, self._limits, events)

    async def go_on(
        self,
        response_id: str,
        events: Sequence[bytes],
        *,
        first_event: int,
        status: str | None = None,
        body: bytes | None = None,
    ) -> bool:
        """Hold a response that runs on, or end it with its `body`; False once it is no longer ours
        to run. `first_event`: the sequence number of the first of `events`. Raises as redis does;
        it may be called again with the same events then."""
        return await self._keys.update(
            response_id,
            self._limits,
            status=status,
            body=None if body is None else body.decode(),
            events=events,
            first_event=first_event,
            holds=body is None,
        )


def _items(responses: Iterable[StoredResponse]) -> Iterator[Item]:
    for response in responses:
        yield from msgspec.json.decode(response.items)
        yield from msgspec.json.decode(response.object)["output"]


def missing(response_id: str) -> RequestError:
    return RequestError(
        f"Response with id '{response_id[:MAX_ID_CHARS]}' not found.",
        status=404,
        code="response_not_found",
        param="id",
    )


@contextmanager
def redis_away() -> Iterator[None]:
    try:
        yield
    except AWAY as error:
        raise RequestError(
            "Redis, which keeps the responses, does not answer. Try again in a moment.",
            status=503,
            code="service_unavailable",
        ) from error

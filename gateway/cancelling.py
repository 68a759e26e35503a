"""Cancelling by id: here, and at whichever gateway holds the request."""

from __future__ import annotations

import asyncio
import uuid
from typing import Final

import msgspec
import structlog

from pagemesh.gateway.headers import is_sane_id
from pagemesh.gateway.open_requests import OpenRequests
from pagemesh.shared.cancel_keys import CancelKeys, Cancelling
from pagemesh.shared.errors import RequestError
from pagemesh.shared.registry import AWAY

PATIENCE_S: Final = 0.3
"""For other gateways to say that they had it. Who says so later has cancelled it all the same."""
RETRY_S: Final = 0.5

log = structlog.get_logger(__name__)


class Cancellations:
    """The asyncio shell around this gateway's open requests."""

    def __init__(self, keys: CancelKeys, here: OpenRequests) -> None:
        self._keys = keys
        self._here = here

    async def cancel(self, ids: set[str], caller: str | None) -> set[str]:
        """As OpenRequests.cancel, at every gateway. Raises RequestError (503) where others cannot
        be told."""
        found = self._here.cancel(ids, caller)
        # What cannot be an id is at no gateway, and takes no room in Redis.
        left = set(filter(is_sane_id, ids - found))
        if not left:
            return found
        try:
            cancelling = Cancelling(uuid.uuid4().hex, sorted(left), caller)
            await self._keys.tell(cancelling)
            return found | await self._keys.confirmed(cancelling.nonce, left, PATIENCE_S)
        except AWAY as error:
            raise RequestError(
                f"{', '.join(sorted(left))[:200]} is not at this gateway, and Redis, through which "
                "the others are told, does not answer.",
                status=503,
            ) from error

    async def run(self) -> None:
        """Hear what others ask for, until cancelled. With Redis away nobody can ask."""
        place: str | None = None
        while True:
            try:
                place = await self._keys.newest() if place is None else await self._hear(place)
            except AWAY:
                await asyncio.sleep(RETRY_S)
            except (msgspec.MsgspecError, KeyError) as error:
                log.warning("cancelling_not_read", reason=str(error))
                place = None

    async def _hear(self, place: str) -> str:
        """The place to go on from."""
        told = await self._keys.follow(place)
        for _, asked in told:
            found = self._here.cancel({*asked.request_ids}, asked.caller)
            if found:
                await self._keys.confirm(asked.nonce, sorted(found))
        return told[-1][0] if told else place

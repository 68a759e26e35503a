"""POST /v1/requests/{request_id}/cancel and /abort_requests."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from aiohttp import web
from msgspec import Struct

from pagemesh.gateway.cancelling import Cancellations
from pagemesh.gateway.openai.answer import encode_json
from pagemesh.gateway.openai.errors import bad
from pagemesh.gateway.request_body import read_body
from pagemesh.gateway.whole import json_answer
from pagemesh.shared.access import Access, authorization_of
from pagemesh.shared.errors import RequestError

MAX_IDS: Final = 1024


class AbortRequests(Struct, kw_only=True):
    """Ids as `x-request-id` told them, or those of the answers."""

    request_ids: list[str]


class CancelEndpoint:
    """A client may cancel what was asked for with its own key, an administrator anything."""

    def __init__(self, cancellations: Cancellations, access: Access) -> None:
        self._cancellations = cancellations
        self._access = access

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        request_id = request.match_info["request_id"]
        if not await self._cancel(request, {request_id}):
            raise RequestError(
                f"No request {request_id[:200]!r} of yours is being answered.", status=404
            )
        return _json(request, {"id": request_id, "object": "request", "status": "cancelled"})

    async def abort(self, request: web.Request) -> web.StreamResponse:
        """vLLM's spelling, for several."""
        try:
            body = msgspec.json.decode(await read_body(request), type=AbortRequests)
        except msgspec.MsgspecError as error:
            raise bad("request_ids", f"must be a list of ids: {error}") from error
        if not 1 <= len(body.request_ids) <= MAX_IDS:
            raise bad("request_ids", f"must hold 1 to {MAX_IDS} ids")
        found = await self._cancel(request, {*body.request_ids})
        return _json(request, {"status": "aborted", "aborted": len(found)})

    async def _cancel(self, request: web.Request, ids: set[str]) -> set[str]:
        caller = self._access.caller(authorization_of(request))
        return await self._cancellations.cancel(ids, caller)


def _json(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return json_answer(request, encode_json(body))

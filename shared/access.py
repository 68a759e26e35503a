"""Who may use which route of a service. Open routes are listed; every other wants a key."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from enum import Enum, auto
from functools import lru_cache
from typing import Final, NamedTuple

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from pagemesh.shared.link import LINK_PATH
from pagemesh.shared.settings import GatewaySettings

OPEN_ROUTES: Final = frozenset({"/health", "/ready", "/metrics"})
# The same on every gateway of a version; a page in a browser cannot be asked for with a key.
OPEN_DOCUMENTS: Final = frozenset({"/docs", "/openapi.json"})
ADMIN: Final = "admin"
ANYONE: Final = "anyone"
OWNER: Final = web.RequestKey("owner", str)
"""Whose is what a request leaves behind, and what it may find."""
# In the spelling without /v1.
ADMINS: Final = frozenset(
    {"/is_paused", "/load", "/pause", "/reset_prefix_cache", "/resume", "/server_info"}
)
"""As vLLM calls them. They are there under /admin too."""
CLIENTS_AND_ADMINS: Final = frozenset({"/requests/{request_id}/cancel", "/abort_requests"})


class Audience(Enum):
    CLIENTS = auto()
    ADMINS = auto()
    BOTH = auto()
    """Each with their key."""


@lru_cache(maxsize=1024)
def audience_of(route: str) -> Audience:
    """Whose the route is if it is not open. A routing table has some hundred."""
    path = route.rstrip("/")
    if ADMIN in path.split("/") or path in ADMINS:
        return Audience.ADMINS
    return Audience.BOTH if path.removeprefix("/v1") in CLIENTS_AND_ADMINS else Audience.CLIENTS


class Keys:
    """The keys of some callers. Only digests are kept, compared in constant time."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.strip()) for key in keys]

    def check(self, authorization: str | None) -> None:
        """Raises HTTPUnauthorized unless the header brings one of the keys: always without any."""
        key = _key_in(authorization)
        if key is None:
            raise _refused("Send an API key: 'Authorization: Bearer KEY'.")
        if not self._know(key):
            raise _refused("The API key is not valid.")

    def are_shown(self, authorization: str | None) -> bool:
        """Whether the header brings one of the keys."""
        key = _key_in(authorization)
        return key is not None and self._know(key)

    def _know(self, key: str) -> bool:
        """Every key is compared, whichever matches."""
        digest = _digest(key)
        return True in [hmac.compare_digest(digest, known) for known in self._digests]


class Access(NamedTuple):
    """The rule of one service. `others` are the keys of routes that are neither open nor an
    administrator's; None lets everybody in."""

    open_routes: frozenset[str]
    admins: Keys
    others: Keys | None

    def check(self, route: str, authorization: str | None) -> None:
        """Raises HTTPUnauthorized. `route` stands in the routing table: not what the client wrote,
        which has many spellings. It is empty where no route fits."""
        audience = audience_of(route)
        if audience is Audience.ADMINS:
            self.admins.check(authorization)
        elif self.others is None or self.is_open(route):
            return
        elif audience is Audience.CLIENTS or not self.admins.are_shown(authorization):
            self.others.check(authorization)

    def owner(self, authorization: str | None) -> str:
        """Of what is kept for whoever asks: one name for each key, which tells nothing of the key;
        ANYONE where clients need none."""
        if self.others is None:
            return ANYONE
        return _digest(f"owner {_key_in(authorization) or ''}").hex()[:32]

    def caller(self, authorization: str | None) -> str | None:
        """The owner that may end a request; None for an administrator, who may end any."""
        return None if self.admins.are_shown(authorization) else self.owner(authorization)

    def lets_anybody(self, route: str) -> bool:
        """Whether no header need be looked at."""
        return self.others is None and audience_of(route) is Audience.CLIENTS

    def is_open(self, route: str) -> bool:
        """To whom has no key."""
        return route.rstrip("/") in self.open_routes


def client_access(gateway: GatewaySettings) -> Access:
    """Of a gateway, where anybody may ask if no keys are set. An administrator's routes are closed
    without a key of theirs."""
    clients = Keys(gateway.api_key) if gateway.api_key else None
    return Access(OPEN_ROUTES | OPEN_DOCUMENTS, Keys(gateway.admin_key), clients)


def link_access(gateway: GatewaySettings) -> Access:
    """Of an inner service. The handshake of a link asks for the mesh secret itself; nobody has a
    key to other routes."""
    return Access(OPEN_ROUTES | {LINK_PATH}, Keys(gateway.admin_key), Keys([]))


def guarding(access: Access) -> Middleware:
    """Let nobody in whom `access` refuses."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        admit(request, route_of(request), access)
        return await handler(request)

    return guard


def admit(request: web.Request, route: str, access: Access) -> None:
    """Note whose the request for `route` is. Raises HTTPUnauthorized when `access` refuses it."""
    if access.lets_anybody(route):
        request[OWNER] = ANYONE
        return
    authorization = authorization_of(request)
    access.check(route, authorization)
    request[OWNER] = access.owner(authorization)


def route_of(request: web.Request) -> str:
    """As it stands in the routing table; empty where no route fits."""
    resource = request.match_info.route.resource
    return "" if resource is None else resource.canonical


def authorization_of(request: web.BaseRequest) -> str | None:
    """As a header of its own, or in the way of Anthropic's clients."""
    given = request.headers.get("Authorization")
    api_key = request.headers.get("X-Api-Key")
    return f"Bearer {api_key}" if given is None and api_key is not None else given


def _key_in(authorization: str | None) -> str | None:
    scheme, _, key = (authorization or "").strip().partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _refused(message: str) -> web.HTTPUnauthorized:
    return web.HTTPUnauthorized(text=message, headers={"WWW-Authenticate": "Bearer"})

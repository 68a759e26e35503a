"""A gateway that drains serves each connection that was open once more.

A client that keeps its connection cannot know that another gateway has the port by now: its next
request comes here. It is served, and its answer ends the connection (`connection: close`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Final

from aiohttp import web

LAST_REQUEST_S: Final = 2.0
"""Who was answered may be about to ask again; after that its connection is closed."""
LAST_REQUEST: Final[ContextVar[bool]] = ContextVar("last_request", default=False)
"""Whether the request at hand is the last one of its connection."""


class Parting:
    """Hears of every request (`asked`, `answered`); until `begin` that costs next to nothing."""

    def __init__(self) -> None:
        self._open: set[object] | None = None
        self._answered_s = 0.0

    @property
    def begun(self) -> bool:
        return self._open is not None

    def begin(self, connections: Iterable[object]) -> None:
        """`connections` are open now, by `request.protocol`."""
        self._open = set(connections)

    def asked(self, request: web.Request) -> None:
        if self._open is not None and request.protocol in self._open and request.method == "POST":
            self._open.discard(request.protocol)
            LAST_REQUEST.set(True)

    def answered(self, request: web.Request) -> None:
        """Probes that keep a connection are no reason to wait."""
        is_open = self._open is None or request.protocol in self._open
        if request.method == "POST" and is_open:
            self._answered_s = time.monotonic()

    def patience_s(self) -> float:
        """How long another request may still come over a connection that was open."""
        if not self._open:
            return 0.0
        return self._answered_s + LAST_REQUEST_S - time.monotonic()

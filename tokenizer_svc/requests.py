"""The requests in flight in one tokenizer service: who asked, and which tasks work on them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import structlog

from pagemesh.shared.errors import RequestError
from pagemesh.shared.ledger import Ledger
from pagemesh.shared.messages import ModelCard, WireError
from pagemesh.tokenizer_svc.outbox import Outbox
from pagemesh.tokenizer_svc.tasks import Tasks

log = structlog.get_logger(__name__)


class Request:
    """One request of one gateway. Owner of the tasks that admit and place it.

    `card` is the one it was checked against, None until then.
    """

    def __init__(self, request_id: str, attempt: int, outbox: Outbox, cache_key: str) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.outbox = outbox
        self.cache_key = cache_key
        self.card: ModelCard | None = None
        self._tasks = Tasks()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.spawn(work, name=f"request-{self.request_id}")

    def cancel(self) -> None:
        """Stop its tasks, but for the one that calls this."""
        self._tasks.cancel()


class RequestTable:
    """Requests by id. `idle` is set while there are none."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._received = 0
        self._ended: Counter[str] = Counter()
        self.idle = asyncio.Event()
        self.idle.set()

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def add(self, request: Request) -> None:
        """Its id is not in the table."""
        self._requests[request.request_id] = request
        self._received += 1
        self.idle.clear()

    def remove(self, request_id: str, outcome: str) -> Request | None:
        """Forget a request and stop its tasks. `outcome` is one of shared.ledger.OUTCOMES."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._ended[outcome] += 1
            request.cancel()
        if not self._requests:
            self.idle.set()
        return request

    def ledger(self) -> Ledger:
        """Of requests."""
        return Ledger(received=self._received, in_flight=len(self._requests), **self._ended)

    def of(self, outbox: Outbox) -> list[str]:
        """Ids of the requests that came over one gateway link."""
        return [r.request_id for r in self._requests.values() if r.outbox is outbox]


def public_error(request_id: str, error: Exception) -> WireError:
    """What the client may read of `error`. What is no RequestError is our fault, and logged."""
    if not isinstance(error, RequestError):
        log.error("request_crashed", request_id=request_id, exc_info=error)
        error = RequestError("internal error", status=500, code="internal_error")
    return error.to_wire()

"""The requests that this gateway answers now, to be cancelled by the ids that clients know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from aiohttp import web

from pagemesh.gateway.generation import Generation
from pagemesh.gateway.headers import REQUEST_ID
from pagemesh.shared.access import OWNER
from pagemesh.shared.errors import RequestError

CANCELLED: Final = 499
"""Nobody's status but a custom of proxies: the answer was called off by its own side."""


@dataclass(eq=False, slots=True)
class OpenRequest:
    """`answer_id` is the `id` in the answer's body."""

    request: web.Request
    answer_id: str
    generation: Generation

    def is_called(self, ids: set[str]) -> bool:
        return self.request[REQUEST_ID] in ids or self.answer_id in ids


class OpenRequests:
    def __init__(self) -> None:
        self._open: set[OpenRequest] = set()

    def enter(self, opened: OpenRequest) -> None:
        self._open.add(opened)

    def leave(self, opened: OpenRequest) -> None:
        self._open.discard(opened)

    def cancel(self, ids: set[str], caller: str | None) -> set[str]:
        """End those that are called so and belong to the owner `caller`, or to anybody for None.
        Returns the ids that were found."""
        found: set[str] = set()
        for each in [each for each in self._open if each.is_called(ids)]:
            if caller is None or caller == each.request.get(OWNER):
                each.generation.fail(_cancelled())
                found.update(ids & {each.request[REQUEST_ID], each.answer_id})
        return found


def _cancelled() -> RequestError:
    return RequestError("The request was cancelled.", status=CANCELLED, code="cancelled")

"""The waiting queue, in the order of the policy."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from pagemesh.scheduler_svc.errors import InvariantError
from pagemesh.scheduler_svc.request import OrderKey, Request
from pagemesh.shared.messages import LAST_PRIORITY

_order = attrgetter("order")


def order_key(policy: str, priority: int, arrival_s: float, number: int) -> OrderKey:
    """First come, first served ignores the priority, but for the last one; under `priority` smaller
    values go first."""
    counts = policy == "priority" or priority == LAST_PRIORITY
    return (priority if counts else 0, arrival_s, number)


class WaitingQueue:
    """Requests by their order key. A preempted request keeps its key, so it returns to the front.

    A sorted list: the queue is bounded, and moving a few thousand pointers costs less than a heap
    that must remember what was cancelled.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self.n_tokens = 0
        """Of their prompts."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._requests)

    def push(self, request: Request) -> None:
        insort(self._requests, request, key=_order)
        self.n_tokens += request.n_prompt

    def remove(self, request: Request) -> None:
        place = bisect_left(self._requests, request.order, key=_order)
        if place == len(self._requests) or self._requests[place] is not request:
            raise InvariantError(f"request {request.request_id} is not in the waiting queue")
        del self._requests[place]
        self.n_tokens -= request.n_prompt

    def drop(self, admitted: list[Request]) -> None:
        """In order, and mostly the first ones."""
        self.n_tokens -= sum(request.n_prompt for request in admitted)
        if self._requests[: len(admitted)] == admitted:
            del self._requests[: len(admitted)]
        else:
            gone = set(admitted)
            self._requests = [request for request in self._requests if request not in gone]

"""How much may wait in one engine, and for how long. No I/O, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from pagemesh.scheduler_svc import notices
from pagemesh.scheduler_svc.lifecycle import Lifecycle
from pagemesh.scheduler_svc.request import Request
from pagemesh.shared.errors import RequestError
from pagemesh.shared.settings import SchedulerSettings

_WINDOW: Final = 256
"""Admissions that the pace is taken from."""
_DEFAULT_WAIT_S: Final = 1.0
_LONGEST_WAIT_S: Final = 60.0


class Pace:
    """How fast requests leave the queue for the worker."""

    def __init__(self) -> None:
        self._admitted_s: deque[float] = deque(maxlen=_WINDOW)

    def admitted(self, n_requests: int, n_left: int, now_s: float) -> None:
        """`n_left` wait on. When nobody does, what was is forgotten: the time until somebody waits
        again says nothing."""
        if n_left == 0:
            self._admitted_s.clear()
        else:
            self._admitted_s.extend([now_s] * min(n_requests, _WINDOW))

    def wait_s(self, n_waiting: int, now_s: float) -> float:
        """Until `n_waiting` requests have left the queue, 1 to 60 seconds; 1 when nothing is known
        yet."""
        return min(max(self.queue_s(n_waiting, now_s), _DEFAULT_WAIT_S), _LONGEST_WAIT_S)

    def queue_s(self, n_waiting: int, now_s: float) -> float:
        """The same without bounds; 0 when nothing is known yet."""
        if not self._admitted_s:
            return 0.0
        return n_waiting * (now_s - self._admitted_s[0]) / len(self._admitted_s)


class Backlog:
    """The bounds of the queue. What is over them is answered 429 or 503, with a time to come back.

    Under the priority policy a newcomer takes the place of requests that would be served after it,
    the last ones first. What has begun is never turned away.
    """

    def __init__(self, settings: SchedulerSettings, lifecycle: Lifecycle) -> None:
        self._settings = settings
        self._lifecycle = lifecycle
        self.pace = Pace()

    def make_room(self, newcomer: Request, now_s: float) -> None:
        """Raises RequestError (429) when it must not wait here."""
        if not _is_fresh(newcomer):
            return  # it runs already, or did on an engine that was lost
        displaced = self._displaced_by(newcomer)
        if displaced is None:
            raise self._refusal(now_s)
        for request in displaced:
            self._lifecycle.turn_away(request, self._refusal(now_s).to_wire())
        if displaced:
            notices.displaced(newcomer, displaced)

    def expire(self, now_s: float) -> None:
        """End with 503 what has waited too long for its first step."""
        longest_s = self._settings.queue_timeout_s
        if longest_s is None:
            return
        fresh = filter(_is_fresh, self._lifecycle.waiting)
        late = [request for request in fresh if now_s - request.queued_s > longest_s]
        for request in late:
            message = f"the request waited for {longest_s:g} s and was not begun"
            error = self._error(message, 503, "queue_timeout", now_s)
            self._lifecycle.turn_away(request, error.to_wire())
        if late:
            notices.waited_too_long(late, longest_s)

    def queue_s(self, now_s: float) -> float:
        """Until all that wait are begun, at the present pace."""
        return self.pace.queue_s(self._lifecycle.n_waiting, now_s)

    def _displaced_by(self, newcomer: Request) -> list[Request] | None:
        """Who has to go for the newcomer to fit; None when not enough may."""
        n_waiting, n_tokens = self._lifecycle.n_waiting, self._lifecycle.waiting.n_tokens
        displaced = list[Request]()
        candidates = self._displaceable(newcomer)
        while not self._fits(newcomer, n_waiting, n_tokens):
            request = next(candidates, None)
            if request is None:
                return None
            displaced.append(request)
            n_waiting, n_tokens = n_waiting - 1, n_tokens - request.n_prompt
        return displaced

    def _fits(self, newcomer: Request, n_waiting: int, n_tokens: int) -> bool:
        """A prompt of any length may wait alone."""
        few = n_tokens + newcomer.n_prompt <= self._settings.max_waiting_tokens
        return n_waiting < self._settings.max_waiting and (few or n_tokens == 0)

    def _displaceable(self, newcomer: Request) -> Iterator[Request]:
        """Of a lower priority and fresh, the last first."""
        for request in reversed(self._lifecycle.waiting):
            if request.order[0] <= newcomer.order[0]:
                return
            if _is_fresh(request) and not request.followers:
                yield request

    def _refusal(self, now_s: float) -> RequestError:
        n_waiting, n_tokens = self._lifecycle.n_waiting, self._lifecycle.waiting.n_tokens
        waiting = f"{n_waiting} requests with {n_tokens} prompt tokens"
        message = f"{waiting} are waiting already; try again later"
        return self._error(message, 429, "engine_overloaded", now_s)

    def _error(self, message: str, status: int, code: str, now_s: float) -> RequestError:
        wait_s = self.pace.wait_s(self._lifecycle.n_waiting, now_s)
        return RequestError(message, status=status, code=code, retry_after_s=wait_s)


def _is_fresh(request: Request) -> bool:
    """No choice of it was ever begun, here or on an engine that was lost."""
    tally = request.client.tallies.get(request.request_id)
    return not (request.resumed or (tally is not None and tally.begun))

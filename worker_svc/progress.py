"""Whether the threads that compute get on: what they are at, how long, and how long they may be."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from pagemesh.shared.engine_messages import Step
from pagemesh.shared.progress import LivedTime, StepPatience, Wait


class _Flying(NamedTuple):
    """A step that was begun and has not landed."""

    step: int
    n_tokens: int


class ComputeProgress:
    """Steps are noted by the threads: `begun` and `undone` by the launching one, `landed` by who
    reads their results, in their order. The event loop looks.

    A step has the device for itself, and its time begins, when those before it have landed. With
    none out an idle worker proves its threads alive by a probe, a job that does nothing.
    """

    def __init__(self, timeout_s: float) -> None:
        self._patience = StepPatience(timeout_s)
        self._flying: deque[_Flying] = deque()
        self._wait = Wait()
        self._lived = LivedTime(time.monotonic())
        self._probe: asyncio.Future[None] | None = None
        self._landed_s = time.monotonic()

    def begun(self, step: Step) -> None:
        self._flying.append(_Flying(step.step, step.n_tokens))

    def undone(self) -> None:
        """The last that was begun never got to the device."""
        self._flying.pop()

    def landed(self, elapsed_s: float | None) -> int:
        """The oldest is over; None: it brought no result. Returns which it was."""
        self._landed_s = time.monotonic()
        flown = self._flying.popleft()
        if elapsed_s is not None:
            self._patience.landed(flown.n_tokens, elapsed_s)
        return flown.step

    def look(self, probe: Callable[[], asyncio.Future[None]]) -> None:
        """Every `shared.progress.LOOK_S`."""
        awaited: object = self._oldest
        if awaited is None:
            if self._probe is None or self._probe.done():
                self._probe = probe()
            awaited = self._probe
        self._wait.look(awaited, self._lived.look(time.monotonic()))

    @property
    def last_step_age_s(self) -> float:
        """Since a step landed, or since the start."""
        return time.monotonic() - self._landed_s

    @property
    def limit_s(self) -> float:
        awaited = self._wait.for_what
        return self._patience.limit_s(awaited.n_tokens if isinstance(awaited, _Flying) else 0)

    def slow(self) -> str | None:
        """What takes suspiciously long: half of what it may."""
        if self._wait.age_s <= self.limit_s / 2:
            return None
        in_step = isinstance(self._wait.for_what, _Flying)
        what = "a step has been computing" if in_step else "the compute threads have not answered"
        return f"{what} for {self._wait.age_s:.0f} s"

    def stalled(self) -> str | None:
        """Why the process should end."""
        return self.slow() if self._wait.age_s > self.limit_s else None

    @property
    def _oldest(self) -> _Flying | None:
        with suppress(IndexError):
            return self._flying[0]
        return None

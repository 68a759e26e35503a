"""The threads that compute, so that the event loop always answers."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple


class Started(NamedTuple):
    """What a job returns that goes on without its thread: `finish` waits for the outcome and
    returns it. `ready`: there is nothing to wait for."""

    finish: Callable[[], Any]
    ready: bool


class _Outcome(NamedTuple):
    value: Any = None
    error: BaseException | None = None


class ComputeThread:
    """Runs jobs in the order they were submitted, one at a time, and delivers their outcomes in
    that order. What a job leaves to be waited for is finished in a second thread, while the first
    goes on with the next job.

    Daemons: a job that never returns does not keep the process alive. Created on the running event
    loop, which receives the results.
    """

    def __init__(self, name: str, landing_name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = (
            SimpleQueue()
        )
        self._started: SimpleQueue[tuple[_Outcome, asyncio.Future[Any]] | None] = SimpleQueue()
        # Each is written by one thread: the difference is what the second one still has.
        self._n_started = self._n_landed = 0
        self._threads = [
            threading.Thread(target=self._compute, name=name, daemon=True),
            threading.Thread(target=self._land, name=landing_name, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], Any]) -> asyncio.Future[Any]:
        """The future gets what `job` returns, or what `finish` of its Started does."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._jobs.put((job, future))
        return future

    def stop(self) -> None:
        """Let the threads end after the jobs they have."""
        self._jobs.put(None)

    def stack(self) -> str:
        """What the threads are doing now, for the log."""
        return "\n".join(f"{thread.name}:\n{_stack(thread)}" for thread in self._threads)

    def _compute(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            outcome = _attempt(job)
            if self._n_started == self._n_landed and not _must_wait(outcome):
                self._settle(_finished(outcome), future)
            else:
                self._n_started += 1
                self._started.put((outcome, future))
        self._started.put(None)

    def _land(self) -> None:
        while (item := self._started.get()) is not None:
            outcome, future = item
            self._settle(_finished(outcome), future)
            self._n_landed += 1  # only now may the first thread settle anything itself

    def _settle(self, outcome: _Outcome, future: asyncio.Future[Any]) -> None:
        # The loop is gone when the process ends while a job runs.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(_tell, future, outcome)


def _attempt(job: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(job())
    except BaseException as error:
        return _Outcome(error=error)


def _must_wait(outcome: _Outcome) -> bool:
    return isinstance(outcome.value, Started) and not outcome.value.ready


def _finished(outcome: _Outcome) -> _Outcome:
    started = outcome.value
    return _attempt(started.finish) if isinstance(started, Started) else outcome


def _tell(future: asyncio.Future[Any], outcome: _Outcome) -> None:
    if future.cancelled():
        return
    if outcome.error is not None:
        future.set_exception(outcome.error)
    else:
        future.set_result(outcome.value)


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "" if frame is None else "".join(traceback.format_stack(frame))

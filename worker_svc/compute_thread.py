"""The one thread that computes, so that the event loop always answers."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class ComputeThread:
    """Runs jobs in the order they were submitted, one at a time.

    A daemon: a job that never returns does not keep the process alive. Created on the running event
    loop, which receives the results.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = (
            SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put((job, future))
        return future

    def stop(self) -> None:
        """Let the thread end after the jobs it has."""
        self._jobs.put(None)

    def stack(self) -> str:
        """What the thread is doing now, for the log."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame))

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            try:
                settle = partial(future.set_result, job())
            except BaseException as error:
                settle = partial(future.set_exception, error)
            # The loop is gone when the process ends while a job runs.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(_unless_cancelled, future, settle)


def _unless_cancelled(future: asyncio.Future[Any], settle: Callable[[], None]) -> None:
    if not future.cancelled():
        settle()

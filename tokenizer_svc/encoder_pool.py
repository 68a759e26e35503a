"""Threads for what takes longer than a tick: rendering, encoding, hashing prompts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Final, TypeVar

from pagemesh.shared.errors import RequestError

# Twice the prompts that one request may bring.
MAX_WAITING: Final = 1024
_MIN_THREADS: Final = 2
_MAX_THREADS: Final = 8

T = TypeVar("T")


class EncoderPool:
    """At least two threads, so that one huge text does not hold up the small ones."""

    def __init__(self, name: str, *, max_threads: int = _MAX_THREADS) -> None:
        cores = len(os.sched_getaffinity(0))
        self._threads = ThreadPoolExecutor(
            max_workers=min(max_threads, max(_MIN_THREADS, cores)), thread_name_prefix=name
        )
        self._lock = Lock()
        self._waiting = 0

    @property
    def waiting(self) -> int:
        """Calls that run or wait for a thread. A cancelled one counts for as long as it runs."""
        return self._waiting

    async def run(self, call: Callable[..., T], *args: object) -> T:
        """`call(*args)` in a thread. Raises RequestError (429) when too many wait already.

        Cancelling drops a call that waits; one that runs goes on, and its result is dropped.
        """
        if self._waiting >= MAX_WAITING:
            raise RequestError(
                f"{MAX_WAITING} texts wait to be tokenized; try again later",
                status=429,
                code="rate_limit_exceeded",
            )
        self._count(1)
        future = self._threads.submit(call, *args)
        future.add_done_callback(self._leave)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _leave(self, _: Future[T]) -> None:
        """Runs in the call's thread, or in the loop's for one that never ran."""
        self._count(-1)

    def _count(self, change: int) -> None:
        with self._lock:
            self._waiting += change

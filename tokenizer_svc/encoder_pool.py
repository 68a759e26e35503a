"""Threads for what takes longer than a tick: rendering, encoding, hashing prompts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from pagemesh.shared.errors import RequestError

MAX_WAITING: Final = 1024
_MIN_THREADS: Final = 2
_MAX_THREADS: Final = 8

T = TypeVar("T")


class EncoderPool:
    """At least two threads, so that one huge prompt does not hold up the small ones."""

    def __init__(self) -> None:
        cores = len(os.sched_getaffinity(0))
        self._threads = ThreadPoolExecutor(
            max_workers=min(_MAX_THREADS, max(_MIN_THREADS, cores)), thread_name_prefix="encoder"
        )
        self.waiting = 0

    async def run(self, call: Callable[..., T], *args: object) -> T:
        """`call(*args)` in a thread. Raises RequestError (429) when too many wait already."""
        if self.waiting >= MAX_WAITING:
            raise RequestError(
                f"{MAX_WAITING} prompts wait to be tokenized; try again later",
                status=429,
                code="rate_limit_exceeded",
            )
        self.waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)
        finally:
            self.waiting -= 1

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

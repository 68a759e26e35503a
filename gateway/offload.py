"""A thread for requests and answers so large that they would hold the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

LARGE_BYTES: Final = 256 * 2**10

T = TypeVar("T")


class Offload:
    """One thread: such work holds the interpreter lock, so that more would only starve the loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="large")

    async def run(self, size_bytes: int, call: Callable[..., T], *args: object) -> T:
        """`call(*args)`, beside the loop if it handles many bytes. `call` must be pure."""
        if size_bytes <= LARGE_BYTES:
            return call(*args)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)

    def close(self) -> None:
        """What was handed over is still done: somebody may wait for it."""
        self._thread.shutdown(wait=False)

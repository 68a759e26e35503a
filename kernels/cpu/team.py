"""The threads that compute a step together."""

from __future__ import annotations

import threading
from collections.abc import Callable

Job = Callable[[int], object]


class Team:
    """`n_threads` threads, the caller's among them. One caller at a time.

    The others sleep between jobs. A job is called with each thread's rank and must be over for all
    when it returns for rank 0 (see sync): the others may begin it late, or twice.
    """

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self._job: Job | None = None
        self._wakes = [threading.Semaphore(0) for _ in range(1, n_threads)]
        for rank, wake in enumerate(self._wakes, 1):
            # A daemon: it holds nothing that must be given back.
            threading.Thread(
                target=self._help, args=(rank, wake), name=f"compute-{rank}", daemon=True
            ).start()

    def run(self, job: Job) -> None:
        self._job = job
        for wake in self._wakes:
            wake.release()
        job(0)

    def close(self) -> None:
        """Let the threads end."""
        self._job = None
        for wake in self._wakes:
            wake.release()

    def _help(self, rank: int, wake: threading.Semaphore) -> None:
        while True:
            wake.acquire()
            job = self._job
            if job is None:
                return
            job(rank)

"""The threads that compute a step together."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import structlog

log = structlog.get_logger(__name__)

Job = Callable[[int], object]


@dataclass(slots=True)
class _Desk:
    """What the threads share: they must not hold the team, or it would never be given up."""

    wakes: list[threading.Semaphore]
    job: Job | None = None
    closed: bool = False

    def wake(self) -> None:
        for wake in self.wakes:
            wake.release()

    def close(self) -> None:
        self.closed = True
        self.wake()


class Team:
    """`n_threads` threads, the caller's among them. One caller at a time.

    The others sleep between jobs and end with the team. A job is called with each thread's rank and
    must be over for all when it returns for rank 0 (see sync): the others may begin it late, twice
    or not at all.
    """

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self._desk = _Desk([threading.Semaphore(0) for _ in range(1, n_threads)])
        weakref.finalize(self, self._desk.close)
        for rank, wake in enumerate(self._desk.wakes, 1):
            # A daemon: it holds nothing that must be given back.
            threading.Thread(
                target=_help, args=(self._desk, rank, wake), name=f"compute-{rank}", daemon=True
            ).start()

    def run(self, job: Job) -> None:
        self._desk.job = job
        self._desk.wake()
        try:
            job(0)
        finally:
            self._desk.job = None


def _help(desk: _Desk, rank: int, wake: threading.Semaphore) -> None:
    while True:
        wake.acquire()
        if desk.closed:
            return
        job = desk.job
        try:
            if job is not None:
                job(rank)
        except Exception:  # what is wrong with a job is the caller's to see; the thread goes on
            log.exception("compute_thread_failed", rank=rank)
        del job

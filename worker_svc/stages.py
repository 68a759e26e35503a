"""What a start is doing, and how long each part of it took."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

Report = Callable[[str], None]
"""Told what is being waited for."""


def process_began_s() -> float:
    """When this process was started, by the clock of `time.monotonic`."""
    age_s = time.time() - psutil.Process().create_time()
    return time.monotonic() - max(0.0, age_s)


class Stages:
    """Each stage lasts until the next is entered. A stage that is entered again goes on."""

    def __init__(
        self,
        report: Report,
        began_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The stage before the first is that of the imports, since `began_s` or else now."""
        self._report = report
        self._clock = clock
        self._name = "imports"
        self._since_s = clock() if began_s is None else began_s
        self._seconds: dict[str, float] = {}

    def enter(self, name: str, doing: str) -> None:
        self._close()
        self._name = name
        self._report(doing)

    def doing(self, what: str) -> None:
        """Still in this stage."""
        self._report(what)

    def finish(self) -> dict[str, float]:
        """Seconds of each stage, in order, and their total."""
        self._close()
        return {**self._seconds, "total": sum(self._seconds.values())}

    def _close(self) -> None:
        now_s = self._clock()
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + now_s - self._since_s
        self._since_s = now_s

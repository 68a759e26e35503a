"""A step that was launched, until its result is here."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import structlog
from numpy.typing import NDArray

from pagemesh.shared.engine_messages import StepResult
from pagemesh.worker_svc.batch import Rows
from pagemesh.worker_svc.executor import Computed, at_once
from pagemesh.worker_svc.results import ResultBuilder

log = structlog.get_logger(__name__)


class Part(NamedTuple):
    """Rows that were computed together, and the names of their requests: their slots may belong to
    others when the part lands."""

    rows: Rows
    computed: Computed
    request_ids: NDArray[np.object_]


class Pace:
    """How long each step took: since it was launched, or since the one before it landed."""

    def __init__(self) -> None:
        self._landed_s = 0.0

    def land(self, launched_s: float) -> float:
        now_s = time.perf_counter()
        elapsed_s = now_s - max(launched_s, self._landed_s)
        self._landed_s = now_s
        return elapsed_s


class Landing:
    """Landings are read in the order of their steps. Holds on to the memory that the device writes
    results to."""

    def __init__(
        self, result: ResultBuilder, parts: list[Part], pace: Pace, launched_s: float
    ) -> None:
        self._result = result
        self._parts = parts
        self._pace = pace
        self._launched_s = launched_s

    @property
    def ready(self) -> bool:
        """Whether the device has nothing left to do, which a CPU never has."""
        return all(part.computed.wait is at_once for part in self._parts)

    def wait(self) -> None:
        """Until the device is done with the step."""
        for part in self._parts:
            part.computed.wait()

    def result(self) -> StepResult:
        """Wait for the device and pack what it found. To be called once."""
        self.wait()
        for part in self._parts:
            self._result.add(part.rows, part.computed)
        self._log_nonfinite()
        return self._result.build(self._pace.land(self._launched_s))

    def _log_nonfinite(self) -> None:
        bad = self._result.nonfinite
        if bad:
            named = (
                zip(part.rows.index.tolist(), part.request_ids, strict=True) for part in self._parts
            )
            requests = [name for pairs in named for row, name in pairs if row in bad]
            log.error("nonfinite_logits", step=self._result.step, requests=requests)

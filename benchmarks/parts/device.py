"""A worker process whose device takes a set time for each step, one after the other.

python -m parts.device        (settings in PAGEMESH_*, the step's time in STEPS_BENCH_STEP_S)

As with an accelerator, a step that waits in the queue starts when the one before it ends, whatever
the process does meanwhile. The loop polls instead of sleeping: no timer is precise enough, and the
process has a core for itself.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from typing import Final, NamedTuple

from pagemesh.shared.engine_messages import Step, StepResult
from pagemesh.shared.link import Link
from pagemesh.shared.messages import Capacity, ModelCard
from pagemesh.shared.settings import Settings
from pagemesh.shared.wire import pack_ids
from pagemesh.worker_svc.memory import CPU_NUM_SEQS
from parts.worker import run_worker, send_result

STEP_S: Final = "STEPS_BENCH_STEP_S"
BLOCKS_PER_ROW: Final = 64
CARD: Final = ModelCard(["steps"], 32_000, 8192, 16, "scripted", [2], 1, "steps", 0)
TOKEN: Final = pack_ids([7])


class Computing(NamedTuple):
    link: Link
    step: Step
    end_s: float


class PunctualDevice:
    """A worker.Device."""

    def __init__(self, rows: int, step_s: float) -> None:
        self.card = CARD
        self.capacity = Capacity(1 + rows * BLOCKS_PER_ROW, rows, 8192, 1024, "cpu")
        self._step_s = step_s
        self._queue: deque[Computing] = deque()
        self._free_s = 0.0

    def take(self, link: Link, step: Step) -> None:
        self._free_s = max(self._free_s, time.perf_counter()) + self._step_s
        self._queue.append(Computing(link, step, self._free_s))

    async def run(self) -> None:
        while True:
            now_s = time.perf_counter()
            while self._queue and self._queue[0].end_s <= now_s:
                self._answer(self._queue.popleft())
            await asyncio.sleep(0)

    def _answer(self, done: Computing) -> None:
        step = done.step
        sampled = TOKEN * step.n_rows
        result = StepResult(step.epoch, step.step, sampled, elapsed_s=self._step_s)
        send_result(done.link, result)


def main() -> None:
    step_s = float(os.environ[STEP_S])

    def device(settings: Settings) -> PunctualDevice:
        return PunctualDevice(settings.scheduler.max_num_seqs or CPU_NUM_SEQS, step_s)

    run_worker(device)


if __name__ == "__main__":
    main()

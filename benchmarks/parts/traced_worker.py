"""The real worker service around a traced runner: python -m parts.traced_worker worker.

Settings come as for any service (PAGEMESH_*), the tasks in STEP_TRACE_PLAN. SIGUSR1 begins the next
task; its outcome is written to the plan's folder as soon as its steps have come.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Final

import msgspec
import uvloop

from pagemesh.shared.logs import configure_logging
from pagemesh.shared.service import serve
from pagemesh.shared.settings import Settings
from pagemesh.shared.settings_sources import load_settings
from pagemesh.worker_svc.build import Report, build_runner
from pagemesh.worker_svc.service import WorkerService
from parts.traced_runner import Outcome, Task, TracedRunner

PLAN: Final = "STEP_TRACE_PLAN"


class Plan(msgspec.Struct):
    """`folder` takes outcomes and traces; `keep`: traces that could be read stay there too."""

    tasks: list[Task]
    folder: str
    keep: bool


def outcome_file(folder: Path, task: Task) -> Path:
    return folder / f"mesh-{task.name}.json"


class TracedWorker:
    """Builds the runner in the worker's thread; signals reach it in the main thread."""

    def __init__(self, plan: Plan) -> None:
        self._tasks = iter(plan.tasks)
        self._folder = Path(plan.folder)
        self._keep = plan.keep
        self._runner: TracedRunner | None = None

    def build(self, settings: Settings, report: Report) -> TracedRunner:
        runner = build_runner(settings, report)
        self._runner = TracedRunner(runner, self._write, self._folder, keep=self._keep)
        return self._runner

    def begin_next(self, *_: object) -> None:
        if self._runner is not None:
            self._runner.begin(next(self._tasks))

    def _write(self, task: Task, outcome: Outcome) -> None:
        """Whole or not at all: somebody waits for the file."""
        path = outcome_file(self._folder, task)
        new = path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(outcome))
        new.rename(path)


def main() -> None:
    settings = load_settings({}, None, os.environ).settings
    configure_logging("worker", settings.log)
    worker = TracedWorker(msgspec.json.decode(os.environ[PLAN], type=Plan))
    signal.signal(signal.SIGUSR1, worker.begin_next)
    uvloop.run(
        serve(
            "worker",
            settings,
            lambda runtime: WorkerService(runtime, worker.build),
            host=settings.mesh.service_host,
            port=0,
        )
    )


if __name__ == "__main__":
    main()

"""A worker process whose next step hangs for ever once the file in HANG_FILE is there; it takes it
away, so that its successor computes."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Final

from pagemesh.cli import main
from pagemesh.worker_svc.batch import Rows
from pagemesh.worker_svc.cpu_executor import CPUExecutor
from pagemesh.worker_svc.executor import Computed

HANG_FILE: Final = "HANG_FILE"


def break_the_executor(hang_file: Path) -> None:
    compute = CPUExecutor.compute

    def hanging(self: CPUExecutor, rows: Rows) -> Computed:
        if hang_file.exists():
            hang_file.unlink()
            threading.Event().wait()
        return compute(self, rows)

    CPUExecutor.compute = hanging  # type: ignore[method-assign]


if __name__ == "__main__":
    break_the_executor(Path(os.environ.pop(HANG_FILE)))
    sys.exit(main(["worker"]))

"""Tasks of a TracedRunner, worked through by the offline class in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Final
from unittest.mock import patch

from pagemesh.bench.engine import computes_on_gpu, offline_llm
from pagemesh.bench.offline import OfflineBench, warmups
from pagemesh.bench.workloads import fixed
from pagemesh.shared.settings import Settings
from pagemesh.worker_svc.build import build_runner
from parts.step_notes import Failed, Outcome, Task
from parts.traced_runner import TracedRunner

_SPARE_TOKENS: Final = 96
"""Requests enter and leave one after the other, and steps are planned ahead."""


def profile_offline(
    settings: Settings, tasks: list[Task], context: int, folder: Path, *, keep: bool
) -> dict[Task, Outcome]:
    """Every task's outcome. Requests have `context` prompt tokens; traces lie in `folder`, see
    TracedRunner."""
    outcomes: dict[Task, Outcome] = {}
    traced: list[TracedRunner] = []

    def build(settings: Settings) -> TracedRunner:
        traced.append(TracedRunner(build_runner(settings), outcomes.__setitem__, folder, keep=keep))
        return traced[0]

    with patch("pagemesh.llm_loop.build_runner", build):
        bench = OfflineBench(
            offline_llm(settings), warmups=warmups(gpu=computes_on_gpu(settings)), show=False
        )
    for index, task in enumerate(tasks):
        traced[0].begin(task)
        n_tokens = task.steps + _SPARE_TOKENS
        bench.seconds(fixed(task.rows, context, n_tokens, index, salt="profile"))
        outcomes.setdefault(task, Failed(traced[0].so_far(), "no trace"))
    return outcomes

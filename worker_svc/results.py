"""Packing what a step brought into its StepResult."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagemesh.kernels.logprobs import Logprobs
from pagemesh.shared.engine_messages import (
    LogprobRow,
    Pooled,
    PromptLogprobs,
    Step,
    StepResult,
)
from pagemesh.worker_svc.batch import WIRE_INT, Ints, Rows
from pagemesh.worker_svc.executor import Computed
from pagemesh.worker_svc.memory import is_out_of_memory
from pagemesh.worker_svc.prompt_logprobs import PromptScores
from pagemesh.worker_svc.sampler import SampledRows

_WIRE_FLOAT = np.dtype("<f4")


class ResultBuilder:
    """Collects a step's rows, which may have been computed in parts."""

    def __init__(self, step: Step) -> None:
        self.step = step.step
        self._epoch = step.epoch
        self._sampled = np.full(step.n_rows, -1, WIRE_INT)
        self.nonfinite: set[int] = set()
        """Places of rows in the step whose logits were NaN or infinite."""
        self._logprobs: list[LogprobRow] = []
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._pooled: list[Pooled] = []
        self._failed: dict[int, str] = {}

    def add(self, rows: Rows, computed: Computed) -> None:
        """What the model gave for `rows`, which is in the host's memory."""
        index, sampled = rows.index[rows.samples], computed.sampled
        self._sampled[index] = sampled.tokens.numpy(force=True)
        if not sampled.finite.all():
            self.nonfinite.update(index[sampled.finite == 0].tolist())
        if sampled.logprobs is not None:
            self._add_logprobs(index, sampled, sampled.logprobs)
        for score in computed.prompts:
            self._add_prompt(int(rows.index[score.row]), score)
        for pooled in computed.pooled:
            vector = pooled.vector().astype(_WIRE_FLOAT, copy=False).tobytes()
            self._pooled.append(Pooled(int(rows.index[pooled.row]), vector))

    def fail(self, rows: Rows, reason: str) -> None:
        self._failed.update(dict.fromkeys(rows.index.tolist(), reason))

    def fail_all(self, reason: str) -> None:
        self._failed = dict.fromkeys(range(len(self._sampled)), reason)

    def build(self, elapsed_s: float) -> StepResult:
        if self._failed:  # of a row split by tokens, a part may have passed
            self._sampled[list(self._failed)] = -1
        return StepResult(
            epoch=self._epoch,
            step=self.step,
            sampled=self._sampled.tobytes(),
            nonfinite=sorted(self.nonfinite),
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
            failed=list(self._failed.items()),
            elapsed_s=elapsed_s,
            pooled=self._pooled,
        )

    def _add_logprobs(self, index: Ints, sampled: SampledRows, logprobs: Logprobs) -> None:
        ids, values, ranks = _to_wire(logprobs)
        rows, tops, more = sampled.asked
        behind = ids.shape[1] - int(more.max())
        for i, row in enumerate(index[rows].tolist()):
            width = 1 + int(tops[i])
            packed_ids, packed_values = ids[i, :width].tobytes(), values[i, :width].tobytes()
            if more[i]:
                last = slice(behind, behind + int(more[i]))
                packed_ids += ids[i, last].tobytes()
                packed_values += values[i, last].tobytes()
            self._logprobs.append(LogprobRow(row, packed_ids, packed_values, int(ranks[i])))

    def _add_prompt(self, row: int, score: PromptScores) -> None:
        ids, values, ranks = _to_wire(score.logprobs)
        self._prompt_logprobs.append(
            PromptLogprobs(
                key=row,
                start=score.start,
                width=ids.shape[1],
                ids=ids.tobytes(),
                values=values.tobytes(),
                ranks=ranks.tobytes(),
            )
        )
        if not score.finite:
            self.nonfinite.add(row)


def describe(error: Exception) -> str:
    """One line for the request's error; the whole is in the log."""
    if is_out_of_memory(error):
        return "out of memory while computing this step"
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _to_wire(logprobs: Logprobs) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    ids, values, ranks = (field.numpy(force=True) for field in logprobs)
    return (
        ids.astype(WIRE_INT, copy=False),
        values.astype(_WIRE_FLOAT, copy=False),
        ranks.astype(WIRE_INT, copy=False),
    )

"""A model that answers from a script: which rows of a step sample, and what. No tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from pagemesh.shared.engine_messages import Step
from pagemesh.shared.step_rows import StepRows

WIRE_INT: Final = np.dtype("<i4")
# Rows start at different places of the text.
_STRIDE_TOKENS: Final = 97


def script_of(text: str, tokenizer_json: Path) -> NDArray[np.int32]:
    """The ids of `text` in a model's real vocabulary, int32[N]."""
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return np.array(ids, dtype=np.int32)


class ScriptedRows:
    """The counts of `max_num_seqs` slots, and how far each has read the script."""

    def __init__(self, script: NDArray[np.int32], max_num_seqs: int) -> None:
        self._script = script
        self._step_rows = StepRows()
        self._known = np.zeros(max_num_seqs, dtype=np.int64)
        self._computed = np.zeros(max_num_seqs, dtype=np.int64)
        self._cursor = np.arange(max_num_seqs, dtype=np.int64) * _STRIDE_TOKENS

    def execute(self, step: Step) -> bytes:
        """Packed `sampled` of the step: one id per row, -1 where the row does not sample."""
        if step.base == 0:
            self._step_rows.clear()
        for row in step.new:
            self._known[row.slot] = len(row.ids) // WIRE_INT.itemsize
            self._computed[row.slot] = row.computed
        rows = self._step_rows.follow(step)
        slots = np.frombuffer(rows.slots, np.int32)
        self._computed[slots] += np.frombuffer(rows.n_tokens, np.int32)
        samples = self._computed[slots] == self._known[slots]
        self._known[slots] += samples
        self._cursor[slots] += samples
        tokens = self._script[self._cursor[slots] % len(self._script)]
        return np.where(samples, tokens, -1).astype(WIRE_INT).tobytes()

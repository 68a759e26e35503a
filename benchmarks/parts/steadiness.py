"""When a batch is steady, seen from its worker: by the rows of its steps, not by a clock."""

from __future__ import annotations

from math import ceil
from typing import Final

from pagemesh.shared.engine_messages import Step

_WARM_UP_STEPS: Final = 16
_ENOUGH_ROWS: Final = 0.95
"""A stream or two of some hundred may be late, or may have ended and be on the way back."""


class Steadiness:
    """Looks at every step in order. One fits when it is nothing but decodes, of `rows` rows or
    nearly; the batch is steady when so many streams have begun and enough steps in a row fitted."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._least_rows = ceil(rows * _ENOUGH_ROWS)
        self._n_begun = 0
        self._in_a_row = 0
        self._n_fitting = 0
        self._n_prefilling = 0
        self._other_rows: list[int] = []

    def fits(self, step: Step) -> bool:
        """To be asked once for each step."""
        self._n_begun += len(step.new)
        if step.new or step.n_tokens != step.n_rows:
            self._n_prefilling += 1
        elif not self._least_rows <= step.n_rows <= self._rows:
            self._other_rows.append(step.n_rows)
        else:
            self._n_fitting += 1
            self._in_a_row += 1
            return True
        self._in_a_row = 0
        return False

    @property
    def is_steady(self) -> bool:
        """Whether the step that was looked at last may be counted."""
        return self._in_a_row > _WARM_UP_STEPS and self._n_begun >= self._rows

    def summary(self) -> str:
        """What has come, for whoever waits in vain."""
        few, most = min(self._other_rows, default=0), max(self._other_rows, default=0)
        return (
            f"{self._n_begun} streams began; {self._n_fitting} steps decoded {self._least_rows} to "
            f"{self._rows} rows, the last {self._in_a_row} of them in a row; "
            f"{self._n_prefilling} had prompts; {len(self._other_rows)} had {few} to {most} rows"
        )

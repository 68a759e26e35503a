"""How many steps are out at a time."""

from __future__ import annotations

from typing import Final

USUAL_DEPTH: Final = 2
DEPTH_OF_SHORT_STEPS: Final = 3
# A result's way up and the next step's way down take about a millisecond between processes: a
# device that steps faster needs two steps in hand.
_SHORT_S: Final = 0.002
_LONG_S: Final = 0.003
_WEIGHT: Final = 0.1
"""Of the newest step in the moving average."""


class RunAhead:
    """`given`, or by the steps' own pace: one more where they are short. A step too many costs
    little: what a request generates after its end is dropped."""

    def __init__(self, given: int | None) -> None:
        self._given = given
        self._step_s: float | None = None
        self._short = False

    @property
    def depth(self) -> int:
        if self._given is not None:
            return self._given
        return DEPTH_OF_SHORT_STEPS if self._short else USUAL_DEPTH

    def landed(self, compute_s: float) -> None:
        """A step took the device so long; 0: not told."""
        if compute_s <= 0:
            return
        before_s = self._step_s if self._step_s is not None else compute_s
        self._step_s = before_s + _WEIGHT * (compute_s - before_s)
        # Two bounds, so that a pace between them does not switch back and forth.
        self._short = self._step_s < (_LONG_S if self._short else _SHORT_S)

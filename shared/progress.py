"""Whether work goes on: how long something may take, and how long it has taken, of the time that
this process lived. Pure: the time comes in.
"""

from __future__ import annotations

from typing import Final

LOOK_S: Final = 0.5
"""How often whoever watches looks."""
_NEW_SIZE: Final = 10.0
"""A step of a size that was not seen before may compile, or read what nobody has read yet."""
_AS_BEFORE: Final = 10.0
"""So many times the longest of late: prompts grow, machines get busy."""
_FORGETTING: Final = 0.99


class LivedTime:
    """Seconds that this process lived through, as one sees who looks every LOOK_S.

    A look that comes late counts as two that came in time: the process was stopped (SIGSTOP, a
    suspended machine) or had no core, and so had what it watches.
    """

    def __init__(self, now_s: float) -> None:
        self._looked_s = now_s

    def look(self, now_s: float) -> float:
        """Since the last look."""
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        return min(passed_s, 2 * LOOK_S)


class StepPatience:
    """How long one step may take: `timeout_s`, or more where there is a reason."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._longest_s = 0.0
        self._most_tokens = 0

    def landed(self, n_tokens: int, elapsed_s: float) -> None:
        """What took longer than it may, and yet landed, was stopped meanwhile."""
        elapsed_s = min(elapsed_s, self.limit_s(n_tokens))
        self._most_tokens = max(self._most_tokens, n_tokens)
        self._longest_s = max(elapsed_s, _FORGETTING * self._longest_s)

    def limit_s(self, n_tokens: int) -> float:
        """Of a step of `n_tokens`."""
        usual_s = max(self._timeout_s, _AS_BEFORE * self._longest_s)
        return usual_s * _NEW_SIZE if n_tokens > 2 * self._most_tokens else usual_s


class Wait:
    """For how long the same thing has been waited for. Things are told apart by identity."""

    def __init__(self) -> None:
        self.for_what: object = None
        self.age_s = 0.0

    def look(self, for_what: object, lived_s: float) -> None:
        """`lived_s` after the last look; None: nothing is waited for."""
        same = for_what is not None and for_what is self.for_what
        self.age_s = self.age_s + lived_s if same else 0.0
        self.for_what = for_what

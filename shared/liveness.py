"""When a silent peer counts as gone: one that is frozen, or whose network is cut, closes nothing.

Pure: the time comes in.
"""

from __future__ import annotations

from typing import Final

BEAT_S: Final = 0.25
"""How often each end says something, whether it has something to say or not."""
SILENCE_S: Final = 1.5
"""So that a client waits for less than three seconds. Event loops may stall for nearly so long."""


class Liveness:
    """Of the peer of one link, which is looked at every BEAT_S.

    Silence counts while we listen. A look that comes late (our event loop was stalled, our process
    stopped) counts as two that came in time: who did not listen cannot say that nobody spoke.
    """

    __slots__ = ("_looked_s", "silent_s")

    def __init__(self, now_s: float) -> None:
        self.silent_s = 0.0
        self._looked_s = now_s

    def heard(self) -> None:
        """A frame came, whatever it says."""
        self.silent_s = 0.0

    def look(self, now_s: float, *, listening: bool) -> bool:
        """Whether the peer has been silent for too long. `listening`: its next frame is waited for,
        and no earlier one is still being worked on."""
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        if listening:
            self.silent_s += min(passed_s, 2 * BEAT_S)
        return self.silent_s >= SILENCE_S

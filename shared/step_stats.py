"""What the steps of an engine took, hop by hop.

Every time is a difference on the clock of one process, so it holds across hosts too.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from pagemesh.shared.distribution import HOP_S, Distribution, Observations

# vLLM's bounds.
STEP_TOKENS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class StepPace(NamedTuple):
    """A step of n tokens takes `overhead_s` + n × `token_s`. Without a `token_s`: not known yet."""

    overhead_s: float = 0.0
    token_s: float = 0.0


class StepStats(NamedTuple):
    """Of one engine, since it came up; as it travels. Times are in seconds, by HOP_S."""

    tokens: Distribution = Distribution()
    """Tokens computed in a step, by STEP_TOKENS."""
    plan_s: Distribution = Distribution()
    """Deciding a step."""
    round_trip_s: Distribution = Distribution()
    """From the decision to the result, both at the scheduler."""
    worker_s: Distribution = Distribution()
    """Within the worker: the wait behind earlier steps, and the computation."""
    compute_s: Distribution = Distribution()
    link_s: Distribution = Distribution()
    """The round trip less the time within the worker."""
    apply_s: Distribution = Distribution()
    """From a result to its tokens on their way up; the next step goes out in between."""


class StepObservations:
    """The same while it grows."""

    __slots__ = StepStats._fields

    def __init__(self) -> None:
        self.tokens = Observations(STEP_TOKENS)
        self.plan_s = Observations(HOP_S)
        self.round_trip_s = Observations(HOP_S)
        self.worker_s = Observations(HOP_S)
        self.compute_s = Observations(HOP_S)
        self.link_s = Observations(HOP_S)
        self.apply_s = Observations(HOP_S)

    def landed(self, round_trip_s: float, inside_s: float, compute_s: float) -> None:
        """A result came."""
        self.round_trip_s.observe(round_trip_s)
        self.worker_s.observe(inside_s)
        self.compute_s.observe(compute_s)
        self.link_s.observe(max(0.0, round_trip_s - inside_s))

    def so_far(self) -> StepStats:
        return StepStats(*(getattr(self, name).so_far() for name in StepStats._fields))

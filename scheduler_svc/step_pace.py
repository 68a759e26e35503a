"""How long an engine's steps take for the tokens they compute. No I/O, no clock."""

from __future__ import annotations

from typing import Final, NamedTuple

from pagemesh.shared.step_stats import StepPace

_WEIGHT: Final = 0.05
"""Of a new step in the means of its size, once there are some."""
_SPREAD: Final = 4.0
"""Between the smallest and the largest steps: closer together they do not make a line."""


class _Mean(NamedTuple):
    tokens: float
    seconds: float
    steps: int


class PaceMeter:
    """Means by the power of two of a step's tokens, so that many small steps do not drown out what
    a few large ones took."""

    def __init__(self) -> None:
        self._means: dict[int, _Mean] = {}

    def observe(self, n_tokens: int, elapsed_s: float) -> None:
        """One step. Those of a worker that does not say how long it took are passed over."""
        if n_tokens <= 0 or elapsed_s <= 0:
            return
        size = n_tokens.bit_length()
        tokens, seconds, steps = self._means.get(size, _Mean(0.0, 0.0, 0))
        weight = max(_WEIGHT, 1 / (steps + 1))
        self._means[size] = _Mean(
            tokens + weight * (n_tokens - tokens),
            seconds + weight * (elapsed_s - seconds),
            steps + 1,
        )

    def pace(self) -> StepPace:
        """The line through the means, by least squares of the relative errors: small steps count as
        much as large ones. Unknown until steps of several sizes were seen."""
        means = list(self._means.values())
        if not means or max(means).tokens < _SPREAD * min(means).tokens:
            return StepPace()
        weights = [1 / mean.seconds**2 for mean in means]
        weighted = list(zip(weights, means, strict=True))
        total = sum(weights)
        mid_tokens = sum(w * mean.tokens for w, mean in weighted) / total
        mid_s = sum(w * mean.seconds for w, mean in weighted) / total
        spread = sum(w * (mean.tokens - mid_tokens) ** 2 for w, mean in weighted)
        together = sum(
            w * (mean.tokens - mid_tokens) * (mean.seconds - mid_s) for w, mean in weighted
        )
        token_s = max(0.0, together / spread)
        overhead_s = max(0.0, mid_s - token_s * mid_tokens)
        return StepPace(overhead_s, token_s)

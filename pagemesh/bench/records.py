"""What the client saw of one request."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

CountedFrom = Literal["usage", "events"]


class Failure(NamedTuple):
    """`kind` groups failures (`HTTP 500`, `cut stream`); `message` is what was said."""

    kind: str
    message: str


@dataclass(slots=True)
class Record:
    """One request. Times are seconds on one clock; `event_s` has an entry an event with output.

    `end_s` is when the last event of the answer came, or when it failed. `n_resends` counts the
    kept connections that were found closed when the request took them.
    """

    index: int
    sent_s: float
    end_s: float
    event_s: array[float] = field(default_factory=lambda: array("d"))
    prompt_tokens: int | None = None
    output_tokens: int = 0
    counted_from: CountedFrom = "events"
    asked_tokens: int = 0
    failure: Failure | None = None
    n_resends: int = 0

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.event_s[0] - self.sent_s

    @property
    def e2el_s(self) -> float:
        """End-to-end latency."""
        return self.end_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.end_s - self.event_s[0]) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> Iterable[float]:
        """Gaps between consecutive events."""
        return (later - earlier for earlier, later in pairwise(self.event_s))

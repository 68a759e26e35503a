"""What an engine counts. Totals only grow."""

from __future__ import annotations

from collections import Counter
from typing import Final

from pagemesh.shared.ledger import Ledger
from pagemesh.shared.step_stats import StepObservations

FINISH_REASONS: Final = ("stop", "length", "abort", "error", "rejected")


class EngineCounters:
    """Token counts of the prefix cache keep first admissions apart from re-admissions after a
    preemption, which would flatter the hit rate."""

    def __init__(self) -> None:
        self.received = 0
        """Each of them runs, waits, or is in `finished`."""
        self.refused: Counter[str] = Counter()
        """Those that never entered, by outcome: one of shared.ledger.OUTCOMES."""
        self.preemptions = 0
        self.preempted_tokens = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self.readmitted_query_tokens = 0
        self.readmitted_hit_tokens = 0
        self.finished: Counter[str] = Counter()
        """By reason, one of FINISH_REASONS."""
        self.audit_findings = 0
        self.failures = 0
        """Times the engine gave up all its requests over an invariant."""
        self.steps = StepObservations()

    @property
    def prefix_miss_rate(self) -> float:
        """Share of the tokens looked up, 0 to 1."""
        return 1 - self.prefix_hit_tokens / max(1, self.prefix_query_tokens)

    def ledger(self, in_flight: int) -> Ledger:
        """Of choices."""
        done = self.finished
        return Ledger(
            received=self.received + self.refused.total(),
            completed=done["stop"] + done["length"],
            aborted=done["abort"],
            rejected=done["rejected"] + self.refused["rejected"],
            failed=done["error"] + self.refused["failed"],
            in_flight=in_flight,
        )

    def count_lookup(self, n_tokens: int, n_hit: int, *, readmitted: bool) -> None:
        if readmitted:
            self.readmitted_query_tokens += n_tokens
            self.readmitted_hit_tokens += n_hit
        else:
            self.prefix_query_tokens += n_tokens
            self.prefix_hit_tokens += n_hit

"""What became of all that a service took in: nothing is lost, at every scrape.

received = completed + aborted + rejected + failed + moved + in flight
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pagemesh.shared.errors import SHUTTING_DOWN
from pagemesh.shared.messages import WireError

OUTCOMES: Final = ("completed", "aborted", "rejected", "failed", "moved")


class Ledger(NamedTuple):
    """Totals since the process began, and what it has now. What is counted is said by whoever
    counts: choices at the gateway and the scheduler, requests at the tokenizer service, rows at the
    worker.

    `aborted`: whoever asked went away. `rejected`: it could not be served, or not now. `moved`: it
    goes on at another process, because this one or the one below was lost or drains.
    """

    received: int = 0
    completed: int = 0
    aborted: int = 0
    rejected: int = 0
    failed: int = 0
    moved: int = 0
    in_flight: int = 0

    @property
    def unaccounted(self) -> int:
        """0, unless something was lost or counted twice."""
        return self.received - sum(self[1:])

    def closed(self) -> Ledger:
        """Whoever counted is gone, and what it had goes on elsewhere."""
        return self._replace(moved=self.moved + self.in_flight, in_flight=0)

    def plus(self, other: Ledger) -> Ledger:
        return Ledger(*map(sum, zip(self, other, strict=True)))


def outcome_of(error: WireError) -> str:
    """One of OUTCOMES, for what ended with `error`. Who may try again in a while was rejected."""
    if error.code == SHUTTING_DOWN:
        return "moved"
    return "rejected" if error.status < 500 or error.retry_after_s is not None else "failed"


class LedgerCollector(Collector):
    """Shows the ledger of a service to Prometheus."""

    def __init__(self, read: Callable[[], Ledger]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        ledger = self._read()
        yield CounterMetricFamily(
            "pagemesh_ledger_received", "Taken in by this process", value=ledger.received
        )
        ended = CounterMetricFamily(
            "pagemesh_ledger_ended", "Ended in this process, by outcome", labels=("outcome",)
        )
        for outcome in OUTCOMES:
            ended.add_metric((outcome,), getattr(ledger, outcome))
        yield ended
        yield GaugeMetricFamily(
            "pagemesh_ledger_in_flight", "In this process now", value=ledger.in_flight
        )

"""The ledger of a service: what was taken in, what became of it, and what is still here."""

from __future__ import annotations

import pytest
from metric_names import Scrape
from prometheus_client import CollectorRegistry, generate_latest

from pagemesh.shared.errors import SHUTTING_DOWN
from pagemesh.shared.ledger import OUTCOMES, Ledger, LedgerCollector, outcome_of
from pagemesh.shared.messages import WireError

SOME = Ledger(received=21, completed=1, aborted=2, rejected=3, failed=4, moved=5, in_flight=6)


def test_what_is_lost_or_counted_twice_shows() -> None:
    assert SOME.unaccounted == 0
    assert SOME._replace(completed=0).unaccounted == 1
    assert SOME._replace(moved=6).unaccounted == -1


def test_what_a_lost_process_had_is_moved() -> None:
    assert SOME.closed() == SOME._replace(moved=11, in_flight=0)
    assert SOME.closed().unaccounted == 0


def test_ledgers_add_up_by_outcome() -> None:
    assert SOME.plus(Ledger(received=1, moved=1)) == SOME._replace(received=22, moved=6)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (WireError(400, None, None, "a bad request"), "rejected"),
        (WireError(429, "engine_overloaded", None, "a full queue", 2.0), "rejected"),
        (WireError(503, "queue_timeout", None, "a long queue", 2.0), "rejected"),
        (WireError(503, SHUTTING_DOWN, None, "ask another"), "moved"),
        (WireError(503, "engine_unavailable", None, "nobody is there"), "failed"),
        (WireError(500, None, None, "a bug"), "failed"),
    ],
)
def test_outcomes_of_errors(error: WireError, outcome: str) -> None:
    assert outcome_of(error) == outcome


def test_a_scrape_shows_all_of_it() -> None:
    registry = CollectorRegistry()
    registry.register(LedgerCollector(lambda: SOME))
    scrape = Scrape.of(generate_latest(registry).decode())
    assert scrape.total("pagemesh_ledger_received_total") == SOME.received
    assert scrape.total("pagemesh_ledger_in_flight") == SOME.in_flight
    ended = scrape.by("pagemesh_ledger_ended_total", "outcome")
    assert ended == {outcome: getattr(SOME, outcome) for outcome in OUTCOMES}

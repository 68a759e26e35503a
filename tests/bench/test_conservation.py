"""The conservation table, from what processes said last."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, Counter, generate_latest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from parts.chaos_mesh import Member
from parts.conservation import BAD_ROWS, Books, ledger_of

from pagemesh.shared.ledger import Ledger, LedgerCollector

WORKER: Final = Member("worker-1", "worker", "http://127.0.0.1:7000")
SOUND: Final = Ledger(received=9, completed=5, moved=1, in_flight=3)


def test_a_scrape_is_read() -> None:
    registry = CollectorRegistry()
    registry.register(LedgerCollector(lambda: SOUND))
    name = BAD_ROWS.removesuffix("_total")
    Counter(name, "rows", ["cause"], registry=registry).labels("failed").inc(2)
    assert ledger_of(generate_latest(registry).decode()) == (SOUND, 2)


def test_processes_add_up_and_the_dead_keep_what_they_had() -> None:
    books = Books()
    books.note(WORKER, 1, SOUND._replace(in_flight=4))
    books.note(WORKER, 1, SOUND)
    books.note(WORKER, 2, Ledger(received=2, completed=1, in_flight=1))
    head, line = books.table({"worker": {2}})
    numbers = dict(zip(head.split(), line.split()[1:], strict=False))
    assert (numbers["received"], numbers["completed"], numbers["moved"]) == ("11", "6", "1")
    assert line.split()[-2:] == ["3", "1"]  # died with its process, and in flight
    assert books.left_over({"worker": {2}}) == ["a worker still has 1 in flight"]


def test_what_is_off_is_said() -> None:
    books = Books()
    books.note(WORKER, 1, SOUND)
    assert books.problems == []
    books.note(WORKER, 1, SOUND._replace(received=10))
    books.note(WORKER, 1, SOUND._replace(completed=4, failed=1))
    books.note(WORKER, 1, SOUND, bad_rows=1)
    assert [problem.partition(":")[2].split(" in ")[0] for problem in books.problems] == [
        *(" 1 unaccounted", " 1 failed, 0 bad rows", " 0 failed, 1 bad rows")
    ]

"""The number of compute threads follows what the process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagemesh.worker_svc.cores import shared_cores, usable_cores

BOUND = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("max 100000\n", BOUND),
        ("50000 100000\n", 1),
        ("150000 100000\n", min(BOUND, 2)),
        ("99900000 100000\n", BOUND),
        ("garbage\n", BOUND),
    ],
)
def test_a_control_group_lowers_it(tmp_path: Path, limit: str, expected: int) -> None:
    (tmp_path / "cpu.max").write_text(limit)
    assert usable_cores(tmp_path) == expected


def test_without_a_control_group_it_is_what_the_process_is_bound_to(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == BOUND


def test_workers_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagemesh.worker_svc.cores.usable_cores", lambda: 8)
    assert [shared_cores(n_workers) for n_workers in (1, 3, 8, 9)] == [8, 2, 1, 1]

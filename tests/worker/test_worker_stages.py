"""The clock of a start."""

from __future__ import annotations

import time

import psutil
import pytest

from pagemesh.worker_svc.stages import Stages, process_began_s


def test_stages_last_until_the_next_and_add_up() -> None:
    times_s = iter([12.0, 15.0, 15.5, 19.0])
    told: list[str] = []
    stages = Stages(told.append, began_s=10.0, clock=lambda: next(times_s))
    stages.enter("weights", "loading")
    stages.doing("loading: 50%")
    stages.enter("graphs", "capturing")
    stages.enter("weights", "loading more")
    assert stages.finish() == {"imports": 2.0, "weights": 6.5, "graphs": 0.5, "total": 9.0}
    assert told == ["loading", "loading: 50%", "capturing", "loading more"]


def test_a_process_began_before_now_by_its_age() -> None:
    age_s = time.time() - psutil.Process().create_time()
    assert time.monotonic() - process_began_s() == pytest.approx(age_s, abs=1.0)


def test_without_a_beginning_it_is_now() -> None:
    times_s = iter([3.0, 4.0])
    assert Stages(print, clock=lambda: next(times_s)).finish() == {"imports": 1.0, "total": 1.0}

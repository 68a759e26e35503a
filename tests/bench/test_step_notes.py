"""Figures of decode steps, from notes with known times."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from parts.step_notes import Note, intervals, lateness, plain_steps

STEP_S = 2e-3


def note(index: int, *, fits: bool = True, frame_s: float = -1e-3, rows: int = 4) -> Note:
    """Of a step that lands every 2 ms; its frame comes `frame_s` after the landing before."""
    before_s = (index - 1) * STEP_S
    return Note(
        n_rows=rows,
        fits=fits,
        arrived_s=before_s + frame_s,
        launch_s=3e-4,
        launch_cpu_ns=200_000,
        launched_s=before_s + frame_s + 5e-4,
        landed_s=before_s + STEP_S,
        landing_cpu_ns=index * 100_000,
    )


def test_steps_that_keep_their_pace() -> None:
    steps = plain_steps(4, 150.0, [note(i) for i in range(11)], 1.5)
    assert (steps.rows, steps.steps, steps.others, steps.mean_rows) == (4, 10, 0, 4)
    assert (steps.context_tokens, steps.graph_ms) == (150.0, 1.5)
    assert [steps.mean_ms, steps.median_ms, steps.p99_ms] == pytest.approx([2.0] * 3)
    assert steps.launch_ms == pytest.approx(0.3)
    assert (steps.launch_cpu_ms, steps.landing_thread_cpu_ms) == pytest.approx((0.2, 0.1))
    for late, early_ms in ((steps.frames, 1.0), (steps.launches, 0.5)):
        assert (late.late_share, late.mean_ms, late.longest_ms) == (0, 0, 0)
        assert late.early_ms == pytest.approx(early_ms)


def test_steps_that_do_not_fit_are_counted_apart() -> None:
    """And so is the one behind each, whose time is not that of steps like it."""
    notes = [note(i, fits=i not in (3, 4, 8)) for i in range(11)]
    assert [round(one.step.landed_s / STEP_S) for one in intervals(notes)] == [1, 2, 6, 7, 10]
    steps = plain_steps(4, 0.0, notes, None)
    assert (steps.steps, steps.others) == (5, 5)


def test_orders_that_come_late_are_waited_for() -> None:
    notes = [note(i, frame_s=1e-4 if i % 2 else -1e-3) for i in range(11)]
    steps = plain_steps(4, 0.0, notes, None)
    assert steps.frames.late_share == pytest.approx(0.5)
    assert steps.frames.mean_ms == pytest.approx(0.05)
    assert steps.frames.longest_ms == pytest.approx(0.1)
    assert steps.frames.early_ms == pytest.approx(1.0)
    assert steps.launches.longest_ms == pytest.approx(0.6)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=40))
def test_lateness_is_ordered(after_s: list[float]) -> None:
    late = lateness(after_s)
    assert 0 <= late.late_share <= 1
    assert 0 <= late.p90_ms <= late.p99_ms * (1 + 1e-9) <= late.longest_ms * (1 + 1e-9) ** 2
    assert late.early_ms >= 0
    assert late.late_share * len(after_s) == pytest.approx(sum(s > 0 for s in after_s))

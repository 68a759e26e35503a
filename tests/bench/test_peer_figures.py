"""How a figure of ours compares with a peer's of another machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from parts.peer_figures import (
    GOALS,
    Comparison,
    Goal,
    ShapeGoals,
    compare,
    compare_value,
    comparison_line,
)

from pagemesh.bench.offline import LatencyFigure, Skipped, ThroughputRun
from pagemesh.bench.workloads import STEP_BATCHES

SHAPE = ShapeGoals(
    {
        "W1": Goal(20_000, 24_000),
        "STEP64": Goal(3.0, 1.5, 64, "ms"),
        "W4": Goal(2.0, rows=1, unit="ms"),
        "PREFIX": Goal(2.0, 1.5, unit="s"),
        "PREFILL128": Goal(14.0, 8.0, unit="ms"),
        "ONLINE64": Goal(10_000, 15_000, 64),
    },
    {1: 1.0, 64: 0.8},
)
LINEAR_MS = {1: 1.25, 64: 0.8}


def test_more_tokens_a_second_are_better() -> None:
    run = ThroughputRun("W1", 0, 2.0, 256, 100, 60_000)
    assert compare(run, SHAPE, LINEAR_MS) == Comparison(
        "W1", 30_000, 20_000, 24_000, 1.5, 1.25, None, None
    )


def test_fewer_milliseconds_are_better_and_the_second_reading_of_a_step_counts() -> None:
    figure = LatencyFigure("STEP64", "a decode step", [4.0, 2.0])
    assert compare(figure, SHAPE, LINEAR_MS) == Comparison(
        "STEP64", 2.0, 3.0, 1.5, 1.5, 0.75, 1.0, 1.5
    )


def test_a_slower_machine_would_slow_the_peer_as_well() -> None:
    figure = LatencyFigure("W4", "a token after it", [1.0, 5.0, 2.0])
    compared = compare(figure, SHAPE, LINEAR_MS)
    assert compared is not None
    assert (compared.value, compared.goal, compared.goal_ratio) == (2.0, None, None)
    assert (compared.ratio, compared.machine, compared.ratio_scaled) == (1.0, 1.25, 1.25)


def test_fewer_seconds_in_all_are_better() -> None:
    run = ThroughputRun("PREFIX", 0, 1.0, 200, 100, 60_000)
    compared = compare(run, SHAPE, LINEAR_MS)
    assert compared is not None
    assert (compared.value, compared.ratio, compared.goal_ratio) == (1.0, 2.0, 1.5)


def test_the_first_token_of_a_prompt_alone_is_compared() -> None:
    figure = LatencyFigure("PREFILL128", "first token", [20.0, 7.0, 4.0])
    compared = compare(figure, SHAPE, LINEAR_MS)
    assert compared is not None
    assert (compared.value, compared.ratio) == (7.0, 2.0)


def test_a_figure_of_no_row_is_compared_by_its_workload() -> None:
    compared = compare_value("ONLINE64", 12_000, SHAPE, {64: 1.2})
    assert compared is not None
    assert (compared.ratio, compared.goal_ratio) == (1.2, 0.8)
    assert compared.machine == pytest.approx(1.5)
    assert compared.ratio_scaled == pytest.approx(1.8)
    assert compare_value("ONLINE32", 12_000, SHAPE, {}) is None


@pytest.mark.parametrize(
    "row",
    [
        ThroughputRun("W1", 1, 2.0, 256, 100, 60_000),  # other lengths than the first repeat's
        ThroughputRun("W3", 0, 2.0, 256, 100, 60_000),
        LatencyFigure("W4", "first token", [1.0]),
        Skipped("W1", "too long"),
    ],
)
def test_nothing_else_is_compared(row: ThroughputRun | LatencyFigure | Skipped) -> None:
    assert compare(row, SHAPE, LINEAR_MS) is None


def test_lines_have_the_columns_of_their_header() -> None:
    compared = Comparison("W4", 2.0, 2.0, None, 1.0, None, 1.25, 1.25)
    assert len(comparison_line(None)) == len(comparison_line(compared))
    cells = comparison_line(compared).split()
    assert cells == ["W4", "2.00", "2.00", "-", "1.00", "-", "1.25", "1.25"]


@pytest.mark.parametrize("name", GOALS)
def test_every_batch_of_a_step_has_its_linear_layers(name: str) -> None:
    shape = GOALS[name]
    assert set(shape.linear_layers_ms) == set(STEP_BATCHES)
    assert {f"STEP{rows}" for rows in STEP_BATCHES} <= set(shape.goals)

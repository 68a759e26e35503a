"""When a batch counts as steady, by the rows of its steps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from parts.steadiness import Steadiness

from pagemesh.shared.engine_messages import NewRow, Step
from pagemesh.shared.sampling import SamplingParams

NEW = NewRow(0, b"", 1, 0, SamplingParams(), b"", 0)


def entering(n_new: int, n_decoding: int) -> Step:
    """Prompts of ten tokens beside rows that decode."""
    rows = n_new + n_decoding
    return Step(1, 1, 0, rows, n_decoding + 10 * n_new, new=[NEW] * n_new)


def decoding(rows: int) -> Step:
    return Step(1, 1, 0, rows, rows)


@pytest.mark.parametrize(("rows", "least"), [(1, 1), (8, 8), (64, 61), (256, 244)])
def test_a_step_fits_with_nearly_all_rows(rows: int, least: int) -> None:
    batch = Steadiness(rows)
    assert all(batch.fits(decoding(n)) for n in range(least, rows + 1))
    assert not batch.fits(decoding(least - 1))
    assert not batch.fits(decoding(rows + 1))


def test_a_step_with_a_chunk_does_not_fit() -> None:
    batch = Steadiness(64)
    assert not batch.fits(Step(1, 1, 0, 64, 80))
    assert not batch.fits(entering(1, 63))


def test_steady_after_enough_steps_that_fit_in_a_row() -> None:
    batch = Steadiness(64)
    batch.fits(entering(64, 0))
    steady = [batch.fits(decoding(64)) and batch.is_steady for _ in range(20)]
    assert steady == [False] * 16 + [True] * 4
    assert not batch.fits(decoding(60))
    assert not batch.is_steady
    assert batch.fits(decoding(64))
    assert not batch.is_steady


def test_not_steady_while_streams_are_still_to_begin() -> None:
    """Though those that have begun are enough."""
    batch = Steadiness(64)
    batch.fits(entering(62, 0))
    assert all(batch.fits(decoding(62)) for _ in range(40))
    assert not batch.is_steady
    batch.fits(entering(2, 62))
    assert all(batch.fits(decoding(64)) for _ in range(17))
    assert batch.is_steady


def test_the_summary_says_what_came() -> None:
    batch = Steadiness(64)
    for step in (entering(3, 0), decoding(3), decoding(2), decoding(64)):
        batch.fits(step)
    assert batch.summary() == (
        "3 streams began; 1 steps decoded 61 to 64 rows, the last 1 of them in a row; 1 had "
        "prompts; 2 had 2 to 3 rows"
    )

"""Quantiles between two scrapes of histograms, of several processes together."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from parts.scrape import buckets, quantile, total


def scrape(*counts: int) -> str:
    bounds = ("0.01", "0.02", "+Inf")
    lines = [f'lag_bucket{{le="{le}"}} {n}.0' for le, n in zip(bounds, counts, strict=True)]
    return "\n".join(["# HELP lag words", *lines, f'lag_count{{a="b c"}} {counts[-1]}.0', ""])


def test_what_was_there_before_does_not_count() -> None:
    before = buckets([scrape(0, 50, 50), scrape(0, 50, 50)], "lag")
    after = buckets([scrape(90, 150, 150), scrape(90, 150, 150)], "lag")
    assert after == {0.01: 180.0, 0.02: 300.0, float("inf"): 300.0}
    assert quantile(before, after, 0.45) == pytest.approx(0.005)
    assert quantile(before, after, 0.95) == pytest.approx(0.01 + 0.01 / 2)


def test_above_every_bound_is_the_last_bound() -> None:
    after = buckets([scrape(0, 0, 10)], "lag")
    assert quantile({}, after, 0.99) == 0.02
    assert quantile(after, after, 0.99) == 0.0


def test_totals_are_of_one_name_whatever_the_labels() -> None:
    assert total(scrape(1, 2, 3), "lag_count") == 3

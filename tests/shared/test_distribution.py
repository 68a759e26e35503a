"""Our histograms count as prometheus_client's own do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as Reference

from pagemesh.shared.distribution import Histogram, Observations

BOUNDS = (0.5, 1, 2.5)


@given(st.lists(st.tuples(st.sampled_from([0, 0.5, 0.75, 1, 2, 2.5, 3]), st.integers(1, 3))))
def test_buckets_sum_and_count_are_those_of_the_reference(
    observed: list[tuple[float, int]],
) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram(ours, "a_seconds", "Help", BOUNDS, labels=("kind",)).labels("x")
    reference = Reference("a_seconds", "Help", ["kind"], buckets=BOUNDS, registry=theirs)
    for value, times in observed:
        histogram.observe(value, times)
        for _ in range(times):
            reference.labels("x").observe(value)
    reference.labels("x")
    assert lines(ours) == [line for line in lines(theirs) if "_created" not in line]


@given(*[st.lists(st.sampled_from([0, 0.5, 1, 3]))] * 2)
def test_what_is_added_counts_as_if_observed(first: list[float], second: list[float]) -> None:
    mine, theirs, all_at_once = Observations(BOUNDS), Observations(BOUNDS), Observations(BOUNDS)
    for observations, values in ((mine, first), (theirs, second), (all_at_once, first + second)):
        for value in values:
            observations.observe(value)
    mine.add(theirs)
    assert mine.so_far() == all_at_once.so_far()


def test_a_series_is_made_once() -> None:
    histogram = Histogram(CollectorRegistry(), "a_seconds", "Help", BOUNDS, labels=("kind",))
    assert histogram.labels("x") is histogram.labels("x")
    assert histogram.labels("x") is not histogram.labels("y")


def lines(registry: CollectorRegistry) -> list[str]:
    """In any order: le stands before or after the other labels."""
    return sorted(generate_latest(registry).decode().splitlines())

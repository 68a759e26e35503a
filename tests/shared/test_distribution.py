"""Our histograms count as prometheus_client's own do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as Reference

from pagemesh.shared.distribution import Histogram

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


def lines(registry: CollectorRegistry) -> list[str]:
    """In any order: le stands before or after the other labels."""
    return sorted(generate_latest(registry).decode().splitlines())

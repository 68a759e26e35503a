"""Figures out of Prometheus' text format."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_LINE: Final = re.compile(r"^(?P<name>[^{ ]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$", re.MULTILINE)
_BOUND: Final = re.compile(r'\ble="([^"]+)"')


def total(text: str, name: str) -> float:
    """Of all series of a metric."""
    return sum(float(line["value"]) for line in _LINE.finditer(text) if line["name"] == name)


def buckets(texts: Iterable[str], name: str) -> dict[float, float]:
    """Cumulative counts by upper bound, of a histogram in several processes."""
    counts: dict[float, float] = {}
    for text in texts:
        for line in _LINE.finditer(text):
            if line["name"] == f"{name}_bucket" and (bound := _BOUND.search(line["labels"])):
                limit = float(bound[1])
                counts[limit] = counts.get(limit, 0.0) + float(line["value"])
    return counts


def quantile(before: dict[float, float], after: dict[float, float], share: float) -> float:
    """Of what was observed in between: where the bucket that holds it ends, or less by as much as
    lies above it there. Nothing observed: 0."""
    gained = {limit: after[limit] - before.get(limit, 0.0) for limit in sorted(after)}
    wanted = share * max(gained.values(), default=0.0)
    low, below = 0.0, 0.0
    for limit, count in gained.items():
        if count >= wanted > below:
            high = low if limit == float("inf") else limit
            return low + (high - low) * (wanted - below) / (count - below)
        low, below = limit, count
    return 0.0

"""What a scrape of /metrics consists of."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

GATEWAY_GOLDEN: Final = Path(__file__).parent / "golden_gateway_metrics.txt"


class Scrape(NamedTuple):
    """The samples of one scrape: (name, labels, value)."""

    samples: list[tuple[str, dict[str, str], float]]

    @classmethod
    def of(cls, text: str) -> Scrape:
        families = text_string_to_metric_families(text)
        return cls([(s.name, s.labels, s.value) for family in families for s in family.samples])

    def total(self, name: str, **labels: str) -> float:
        """The sum over all series of `name` with these labels."""
        return sum(
            value
            for sample, of_sample, value in self.samples
            if sample == name and of_sample.items() >= labels.items()
        )

    def by(self, name: str, label: str) -> dict[str, float]:
        """The sums by one label, where there is anything."""
        values = {labels[label] for sample, labels, _ in self.samples if sample == name}
        totals = {value: self.total(name, **{label: value}) for value in values}
        return {value: total for value, total in totals.items() if total}


def names_types_labels(text: str) -> str:
    """One line for each name, sorted: the name, its type, and the labels of its series."""
    lines = set()
    for family in text_string_to_metric_families(text):
        if family.name.endswith("_created"):
            continue
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        suffix = "_total" if family.type == "counter" else ""
        lines.add(" ".join([family.name + suffix, family.type, *sorted(labels)]))
    return "\n".join([*sorted(lines), ""])

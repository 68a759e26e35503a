"""From samples to medians, and from medians to ratios."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Final

Samples = Mapping[str, Mapping[str, Sequence[float]]]
"""By server, then by row key."""

_TITLE_WIDTH: Final = 36
_WIDTH: Final = 16


def medians(samples: Samples) -> dict[str, dict[str, float]]:
    return {
        server: {key: median(values) for key, values in rows.items() if values}
        for server, rows in samples.items()
    }


def ratios(figures: Mapping[str, Mapping[str, float]], own: str) -> dict[str, dict[str, float]]:
    """`own` over each other server, for the rows that both have."""
    return {
        server: {
            key: figures[own][key] / value
            for key, value in rows.items()
            if _both(figures[own], key, value)
        }
        for server, rows in figures.items()
        if server != own
    }


def _both(own: Mapping[str, float], key: str, value: float) -> bool:
    return key in own and value > 0


def table_lines(
    titles: Mapping[str, str], columns: Mapping[str, Mapping[str, float]], digits: int
) -> Iterator[str]:
    """A row a title, a column a server; a dash where there is no figure."""
    yield f"{'':<{_TITLE_WIDTH}}" + "".join(f"{name:>{_WIDTH}}" for name in columns)
    for key, title in titles.items():
        cells = (_cell(column.get(key), digits) for column in columns.values())
        yield f"{title:<{_TITLE_WIDTH}}" + "".join(cells)


def _cell(value: float | None, digits: int) -> str:
    return f"{'-' if value is None else format(value, f'.{digits}f'):>{_WIDTH}}"

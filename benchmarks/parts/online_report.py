"""The figures of a mesh under load, printed as they come, kept in a file, and compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Final

from pagemesh.bench.offline import ThroughputRun
from pagemesh.bench.report_local import Row, row_line
from pagemesh.shared.settings import Settings
from parts.figure_file import FigureFile
from parts.peer_figures import (
    GOALS,
    NO_GOALS,
    ONLINE_SIZES,
    Comparison,
    compare_value,
    comparison_line,
    linear_layers_line,
)

ONLINE: Final = "ONLINE"
"""The name of a workload; behind it stands how many requests there are at a time."""
LEAST_OF_OFFLINE: Final = 0.97
_RATE: Final = "output_throughput"
_METRICS: Final = ("ttft", "tpot", "itl")
_STATISTICS: Final = ("median", "p99")


class OnlineReport:
    """`sizes` are the requests of a run, their prompt tokens and their output tokens: of other
    sizes than vLLM's, nothing is compared. The file is in `folder`, as `name`.json."""

    def __init__(self, folder: Path, settings: Settings, sizes: tuple[int, int, int]) -> None:
        model = Path(settings.model.model).name
        self.name: Final = f"online-{model}"
        self.failures: Final[dict[str, str]] = {}
        self._file = FigureFile(folder / f"{self.name}.json", settings)
        self._shape = GOALS.get(model, NO_GOALS) if sizes == ONLINE_SIZES else NO_GOALS
        self._start_s: float | None = None
        self._linear_ms: dict[int, float] = {}
        self._runs: dict[str, list[dict[str, Any]]] = {}
        self._offline: dict[int, list[dict[str, Any]]] = {}

    def add_start(self, seconds: float) -> None:
        self._start_s = seconds
        self._say(f"pagemesh serve: first answer after {seconds:.1f} s")

    def add_run(self, name: str, repeat: int, figures: dict[str, Any]) -> None:
        self._runs.setdefault(name, []).append(figures)
        self._say("\n".join((f"{name} #{repeat}  {_rates(figures)}", *_details(figures))))

    def add_linear_layers(self, times_ms: dict[int, float]) -> None:
        self._linear_ms = times_ms
        self._say(linear_layers_line(times_ms))

    def add_offline(self, at_a_time: int, row: Row, figures: dict[str, Any]) -> None:
        if isinstance(row, ThroughputRun):
            self._offline.setdefault(at_a_time, []).append(figures)
        self._say(row_line(row))

    def fail(self, where: str, what: str) -> None:
        self.failures[where] = what
        self._say(f"{where} FAILED: {what}")

    def say_compared(self) -> None:
        compared = list(self._compared())
        lines = [comparison_line(each) for each in (None, *compared)] if compared else []
        for n, share in self._of_offline().items():
            lines.append(f"online / offline at {n}: {share:.3f} (asked: {LEAST_OF_OFFLINE})")
        lines += [f"{where} FAILED" for where in self.failures]
        print("\n".join(lines), flush=True)

    def _compared(self) -> Iterator[Comparison]:
        """Medians over the runs; rates before latencies."""
        for compared in (*self._rate_comparisons(), *self._latency_comparisons()):
            if compared is not None:
                yield compared

    def _rate_comparisons(self) -> Iterator[Comparison | None]:
        for name, runs in self._runs.items():
            rate = _median(runs, _RATE)
            yield compare_value(name, rate, self._shape, self._linear_ms)

    def _latency_comparisons(self) -> Iterator[Comparison | None]:
        for name, runs in self._runs.items():
            for metric, statistic in product(_METRICS, _STATISTICS):
                workload = f"{name}-{metric}-{statistic}"
                if workload in self._shape.goals:
                    ms = _median(runs, f"{statistic}_{metric}_ms")
                    yield compare_value(workload, ms, self._shape, self._linear_ms)

    def _of_offline(self) -> dict[int, float]:
        """The mesh's tokens a second over the engine's, by requests at a time, where both are."""
        return {
            n: _median(self._runs[f"{ONLINE}{n}"], _RATE) / _median(rows, _RATE)
            for n, rows in self._offline.items()
            if f"{ONLINE}{n}" in self._runs
        }

    def _say(self, line: str) -> None:
        figures = {
            "start_s": self._start_s,
            "runs": self._runs,
            "linear_layers_ms": self._linear_ms,
            "offline": self._offline,
            "compared": [compared._asdict() for compared in self._compared()],
            "of_offline": self._of_offline(),
            "failures": self.failures,
        }
        self._file.say(line, figures)


def _median(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(median(row[key] for row in rows))


def _rates(figures: Mapping[str, Any]) -> str:
    """An answer of one token has no time between tokens."""
    latencies = (
        f"  {metric.upper()} {figures[f'median_{metric}_ms']:.2f}/{figures[f'p99_{metric}_ms']:.2f}"
        for metric in _METRICS
        if f"median_{metric}_ms" in figures
    )
    return f"{figures[_RATE]:9.1f} output tok/s{''.join(latencies)} ms (p50/p99)"


def _details(figures: Mapping[str, Any]) -> Iterator[str]:
    cpu = figures["cpu"]
    shown = "  ".join(f"{name} {us:.1f}" for name, us in cpu["us_per_token"].items())
    yield (
        f"    CPU us a token: {shown}; busiest: the {cpu['busiest']}, "
        f"{cpu['busiest_share']:.0%} of a core"
    )
    for limit in figures["client"]["limits"]:
        yield f"    {limit}"

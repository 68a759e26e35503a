"""The offline workloads on one H200, beside what vLLM does with them there.

    python benchmarks/gpu/offline_h200.py qwen3-0.6b --out DIR
    python benchmarks/gpu/offline_h200.py llama31-8b --out DIR

First all linear layers of the shape run in one CUDA graph through cuBLAS, which tells how the
machine compares with that of vLLM's figures. Then one engine, with random weights, runs workloads
of `pagemesh bench` (of the large shape W1, W2 and W3 only by request: they take minutes). Every
figure is written as soon as it is there. Ratios above 1 are in our favour; "machine" is how much
longer the linear layers take here, "x scaled" the ratio to a vLLM as much slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parts.engine_rows import engine_rows, machine_ms
from parts.figure_file import FigureFile
from parts.peer_figures import (
    GOALS,
    NO_GOALS,
    Comparison,
    ShapeGoals,
    compare,
    comparison_line,
    linear_layers_line,
)
from parts.shape_args import parse_shape_args

from pagemesh.bench.offline import OfflineBench, latency, throughput
from pagemesh.bench.report_local import Row, row_line
from pagemesh.bench.workloads import LATENCY_PRESETS, PRESETS
from pagemesh.shared.settings import Settings

STEP_REPEATS = 2
WORKLOADS = {
    "qwen3-0.6b": ["STEP", "W4", "W5", "W1"],
    "llama31-8b": ["STEP", "W4", "W5", "PREFILL", "PREFIX"],
}
OTHER_WORKLOADS = ["STEP", "W4", "W5"]


def add_options(group: Any) -> None:
    names = [*LATENCY_PRESETS, *(name for name in PRESETS if name not in LATENCY_PRESETS)]
    group.add_argument("--workload", nargs="+", choices=names, default=[], help="default: by shape")
    group.add_argument("--num-iters", type=int, default=3, metavar="N", help="repeats")
    group.add_argument("--out", type=Path, default=Path("offline-h200"), metavar="DIR")


class Report:
    """What was measured so far, printed as it comes and kept in a file."""

    def __init__(self, path: Path, settings: Settings, shape: ShapeGoals) -> None:
        self._file = FigureFile(path, settings)
        self._shape = shape
        self._linear_ms: dict[int, float] = {}
        self._rows: list[dict[str, Any]] = []
        self._compared: list[Comparison] = []

    def add_linear_layers(self, times_ms: dict[int, float]) -> None:
        self._linear_ms = times_ms
        self._say(linear_layers_line(times_ms))

    def add(self, row: Row, figures: dict[str, Any]) -> None:
        self._rows.append(figures)
        compared = compare(row, self._shape, self._linear_ms)
        if compared is not None:
            self._compared.append(compared)
        self._say(row_line(row))

    def say_compared(self) -> None:
        print("\n".join(map(comparison_line, [None, *self._compared])), flush=True)

    def _say(self, line: str) -> None:
        figures = {
            "linear_layers_ms": self._linear_ms,
            "rows": self._rows,
            "compared": [compared._asdict() for compared in self._compared],
        }
        self._file.say(line, figures)


def rows_of(bench: OfflineBench, names: list[str], n_repeats: int) -> Iterator[Row]:
    for name in names:
        if name == "STEP":
            yield from latency(bench, [name], STEP_REPEATS)
        elif name in LATENCY_PRESETS:
            yield from latency(bench, [name], n_repeats)
        else:
            yield from throughput(bench, {name: PRESETS[name]}, n_repeats)


def measure(names: list[str], n_repeats: int, settings: Settings, report: Report) -> None:
    if times_ms := machine_ms(settings):
        report.add_linear_layers(times_ms)
    for row, figures in engine_rows(settings, lambda bench: rows_of(bench, names, n_repeats)):
        report.add(row, figures)


def main() -> None:
    args, settings = parse_shape_args("offline_h200", __doc__, add_options)
    args.out.mkdir(parents=True, exist_ok=True)
    name = Path(settings.model.model).name
    report = Report(args.out / f"offline-{name}.json", settings, GOALS.get(name, NO_GOALS))
    names = args.workload or WORKLOADS.get(name, OTHER_WORKLOADS)
    measure(names, args.num_iters, settings, report)
    report.say_compared()


if __name__ == "__main__":
    main()

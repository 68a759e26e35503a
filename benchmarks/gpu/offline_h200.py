"""The offline workloads on one H200, beside what vLLM does with them there.

    python benchmarks/gpu/offline_h200.py qwen3-0.6b --out DIR
    python benchmarks/gpu/offline_h200.py llama31-8b --out DIR

First all linear layers of the shape run in one CUDA graph through cuBLAS, which tells how the
machine compares with that of vLLM's figures. Then one engine, with random weights, runs workloads
of `pagemesh bench` (W1 only by request for the large shape: it takes minutes). Every figure is
written as soon as it is there. Ratios above 1 are in our favour; "machine" is how much longer the
linear layers take here, "x scaled" the ratio to a vLLM as much slower.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from parts.linear_layers import linear_layers_ms
from parts.peer_figures import GOALS, Comparison, ShapeGoals, compare, comparison_line
from parts.shape_args import parse_shape_args

from pagemesh.bench.engine import computes_on_gpu, engine_settings, offline_llm
from pagemesh.bench.environment import environment, sampled_card
from pagemesh.bench.offline import OfflineBench, latency, throughput, warmups
from pagemesh.bench.report_local import Row, row_line, sampled_rows
from pagemesh.bench.workloads import LATENCY_PRESETS, PRESETS, STEP_BATCHES
from pagemesh.prepare import prepare
from pagemesh.shared.settings import Settings
from pagemesh.worker_svc.models.config import DecoderConfig

STEP_REPEATS = 2
WORKLOADS = {"qwen3-0.6b": ["STEP", "W4", "W5", "W1"]}
OTHER_WORKLOADS = ["STEP", "W4", "W5"]


def add_options(group: Any) -> None:
    names = [*LATENCY_PRESETS, *(name for name in PRESETS if name not in LATENCY_PRESETS)]
    group.add_argument("--workload", nargs="+", choices=names, default=[], help="default: by shape")
    group.add_argument("--num-iters", type=int, default=3, metavar="N", help="repeats")
    group.add_argument("--out", type=Path, default=Path("offline-h200"), metavar="DIR")


class Report:
    """What was measured so far, printed as it comes and kept in a file."""

    def __init__(self, path: Path, settings: Settings, shape: ShapeGoals) -> None:
        self._path = path
        self._shape = shape
        self._begun_s = time.monotonic()
        self._linear_ms: dict[int, float] = {}
        self._rows: list[dict[str, Any]] = []
        self._compared: list[Comparison] = []
        self._where = {"settings": engine_settings(settings), "environment": environment()}

    def add_linear_layers(self, times_ms: dict[int, float]) -> None:
        self._linear_ms = times_ms
        shown = "  ".join(f"{rows}: {ms:.3f}" for rows, ms in times_ms.items())
        self._say(f"linear layers through cuBLAS, ms at rows  {shown}")

    def add(self, row: Row, figures: dict[str, Any]) -> None:
        self._rows.append(figures)
        compared = compare(row, self._shape, self._linear_ms)
        if compared is not None:
            self._compared.append(compared)
        self._say(row_line(row))

    def say_compared(self) -> None:
        print("\n".join(map(comparison_line, [None, *self._compared])), flush=True)

    def _say(self, line: str) -> None:
        seconds = time.monotonic() - self._begun_s
        print(f"[{seconds:6.1f} s] {line}", flush=True)
        figures = {
            "linear_layers_ms": self._linear_ms,
            "rows": self._rows,
            "compared": [compared._asdict() for compared in self._compared],
            "seconds": seconds,
            **self._where,
        }
        encoded = msgspec.json.format(msgspec.json.encode(figures), indent=1)
        self._path.write_bytes(encoded)


def rows_of(bench: OfflineBench, names: list[str], n_repeats: int) -> Iterator[Row]:
    for name in names:
        if name == "STEP":
            yield from latency(bench, [name], STEP_REPEATS)
        elif name in LATENCY_PRESETS:
            yield from latency(bench, [name], n_repeats)
        else:
            yield from throughput(bench, {name: PRESETS[name]}, n_repeats)


def measure(names: list[str], n_repeats: int, settings: Settings, report: Report) -> None:
    if torch.cuda.is_available():
        config = DecoderConfig.from_folder(prepare(settings.model))
        report.add_linear_layers(linear_layers_ms(config, list(STEP_BATCHES)))
    bench = OfflineBench(
        offline_llm(settings), warmups=warmups(gpu=computes_on_gpu(settings)), show=False
    )
    with sampled_card() as card:
        for row, figures in sampled_rows(rows_of(bench, names, n_repeats), card):
            report.add(row, figures)


def main() -> None:
    args, settings = parse_shape_args("offline_h200", __doc__, add_options)
    args.out.mkdir(parents=True, exist_ok=True)
    name = Path(settings.model.model).name
    report = Report(
        args.out / f"offline-{name}.json", settings, GOALS.get(name, ShapeGoals({}, {}))
    )
    names = args.workload or WORKLOADS.get(name, OTHER_WORKLOADS)
    measure(names, args.num_iters, settings, report)
    report.say_compared()


if __name__ == "__main__":
    main()

"""The figures of `bench throughput`, `latency` and `startup`, as lines and as JSON."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from statistics import median
from typing import Any, Final

from pagemesh.bench.environment import CardSamples
from pagemesh.bench.memory import MemoryUse
from pagemesh.bench.offline import LatencyFigure, Skipped, ThroughputRun
from pagemesh.bench.startup import StartupRun

_MIB: Final = 2**20
_RATES: Final = ("output_throughput", "total_token_throughput", "request_throughput")
_MOMENTS: Final = {
    "listening_s": "listening",
    "ready_s": "ready",
    "first_answer_s": "first answer",
}

Row = ThroughputRun | LatencyFigure | Skipped


def row_line(row: Row) -> str:
    match row:
        case ThroughputRun():
            return (
                f"{row.workload:<12} #{row.repeat} {row.seconds:9.2f} s"
                f" {row.output_throughput:10.1f} output tok/s"
                f" {row.total_token_throughput:10.1f} total tok/s"
                f" {row.request_throughput:8.2f} req/s"
            )
        case LatencyFigure():
            values = " ".join(f"{value:.2f}" for value in row.values_ms)
            return f"{row.workload:<12} {row.figure:<16} {row.median_ms:9.2f} ms  ({values})"
        case Skipped():
            return f"{row.workload:<12} skipped: {row.reason}"


def sampled_rows(rows: Iterable[Row], card: CardSamples) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Each row, which is measured while it is waited for, and its JSON with what the card did
    meanwhile (null: nobody looked)."""
    since_s = time.monotonic()
    for row in rows:
        now_s = time.monotonic()
        yield row, row_json(row) | {"gpu": card.between(since_s, now_s)}
        since_s = time.monotonic()


def row_json(row: Row) -> dict[str, Any]:
    match row:
        case ThroughputRun():
            return asdict(row) | {name: getattr(row, name) for name in _RATES}
        case LatencyFigure():
            return asdict(row) | {"median_ms": row.median_ms}
        case Skipped():
            return {"workload": row.workload, "skipped": row.reason}


def startup_lines(runs: list[StartupRun]) -> Iterable[str]:
    """Medians over the runs, every value beside them; the highest memory peaks."""
    for key, label in _MOMENTS.items():
        yield _seconds_line(label, [getattr(run, key) for run in runs])
    stages = _stages(runs)
    if stages:
        yield "the worker's start"
    for name, values in stages.items():
        yield _seconds_line(f"  {name.replace('_', ' ')}", values)
    yield f"{'peak memory':<14}{'PSS MiB':>9}{'RSS MiB':>10}"
    for service, use in _peaks(runs).items():
        yield f"  {service:<12}{use.pss / _MIB:9.1f}{use.rss / _MIB:10.1f}"


def _seconds_line(label: str, values: list[float]) -> str:
    shown = " ".join(f"{value:.2f}" for value in values)
    return f"{label:<14}{median(values):9.2f} s  ({shown})"


def _stages(runs: list[StartupRun]) -> dict[str, list[float]]:
    """The seconds of each stage of the worker's start, in all runs that tell them."""
    names = dict.fromkeys(name for run in runs for name in run.worker_stages_s)
    told = [run.worker_stages_s for run in runs if run.worker_stages_s]
    return {name: [stages.get(name, 0.0) for stages in told] for name in names}


def startup_json(runs: list[StartupRun]) -> dict[str, Any]:
    return {
        "runs": [
            {key: getattr(run, key) for key in _MOMENTS}
            | {
                "worker_stages_s": run.worker_stages_s,
                "memory_division": run.division,
                "peak_memory_bytes": _named(run.memory.by_service, run.memory.total),
            }
            for run in runs
        ],
        **{f"median_{key}": median(getattr(run, key) for run in runs) for key in _MOMENTS},
        "median_worker_stages_s": {name: median(values) for name, values in _stages(runs).items()},
        "peak_memory_bytes": {name: use._asdict() for name, use in _peaks(runs).items()},
    }


def _peaks(runs: list[StartupRun]) -> dict[str, MemoryUse]:
    peaks: dict[str, MemoryUse] = {}
    total = MemoryUse()
    for run in runs:
        total = total.peak(run.memory.total)
        for service, use in run.memory.by_service.items():
            peaks[service] = use.peak(peaks.get(service, MemoryUse()))
    return {**peaks, "all together": total}


def _named(by_service: dict[str, MemoryUse], total: MemoryUse) -> dict[str, dict[str, int]]:
    return {name: use._asdict() for name, use in {**by_service, "all together": total}.items()}

"""What vLLM 0.26 does on one H200, what we aim at, and how a figure of ours compares.

bfloat16, random weights, defaults otherwise (FlashAttention 3, CUDA graphs, asynchronous
scheduling). ONLINE64 and ONLINE256 are streamed requests of ONLINE_SIZES, so many at a time; the
others are workloads of `pagemesh bench` offline. Steps of the small shape differ by up to 30%
between machines, and the linear layers through cuBLAS with them, so those of the machine that gave
the figures stand beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from pagemesh.bench.offline import LatencyFigure, ThroughputRun
from pagemesh.bench.report_local import Row

_NAME_CHARS: Final = 22

Unit = Literal["tok/s", "ms", "s"]


class Goal(NamedTuple):
    """Output tokens a second, milliseconds a step or token, or seconds in all; of steps of `rows`
    rows. None: not measured, or nothing aimed at."""

    vllm: float
    ours: float | None = None
    rows: int | None = None
    unit: Unit = "tok/s"


class ShapeGoals(NamedTuple):
    """Of one model shape, by workload; and the milliseconds of all its linear layers by rows."""

    goals: Mapping[str, Goal]
    linear_layers_ms: Mapping[int, float]


NO_GOALS: Final = ShapeGoals({}, {})
ONLINE_SIZES: Final = (400, 512, 128)
"""Requests, prompt tokens and output tokens of the ONLINE workloads."""


def _steps(vllm: Mapping[int, float], ours: Mapping[int, float]) -> dict[str, Goal]:
    return {f"STEP{rows}": Goal(ms, ours.get(rows), rows, "ms") for rows, ms in vllm.items()}


def _latencies(run: str, **vllm: tuple[float, float]) -> dict[str, Goal]:
    """Median and 99th percentile in milliseconds, by metric."""
    return {
        f"{run}-{metric}-{statistic}": Goal(ms, unit="ms")
        for metric, both in vllm.items()
        for statistic, ms in zip(("median", "p99"), both, strict=True)
    }


GOALS: Final[Mapping[str, ShapeGoals]] = {
    "qwen3-0.6b": ShapeGoals(
        {
            "W1": Goal(20_860, 24_000),
            "W1greedy": Goal(20_668),
            **_steps(
                {1: 2.4, 8: 2.4, 32: 2.3, 64: 2.7, 128: 4.5, 256: 6.6}, {1: 1.2, 64: 1.5, 256: 3.0}
            ),
            "W4": Goal(2.4, None, 1, "ms"),
            "ONLINE64": Goal(9_730, 14_000, 64),
            "ONLINE256": Goal(11_900, 20_000, 256),
            **_latencies("ONLINE64", ttft=(254, 352), tpot=(4.36, 5.18), itl=(4.07, 31.6)),
            **_latencies("ONLINE256", ttft=(584, 1523), tpot=(15.2, 19.5), itl=(13.0, 46.9)),
        },
        {1: 0.95, 8: 0.77, 32: 0.80, 64: 0.82, 128: 0.86, 256: 0.95},
    ),
    "llama31-8b": ShapeGoals(
        {
            **_steps(
                {1: 4.9, 8: 5.1, 32: 5.4, 64: 5.9, 128: 7.0, 256: 10.9},
                {64: 5.0, 128: 5.7, 256: 8.6},
            ),
            "W2": Goal(10_240, 10_800),
            "W3": Goal(14.2, 14.2, unit="s"),
            "W4": Goal(4.89, 4.2, 1, "ms"),
            "W5": Goal(5.5, 4.8, 32, "ms"),
            "PREFILL128": Goal(14, 8, unit="ms"),
            "PREFILL1024": Goal(31, 26, unit="ms"),
            "PREFILL4096": Goal(102, 100, unit="ms"),
            "PREFILL8192": Goal(216, 216, unit="ms"),
            "PREFIX": Goal(1.95, 1.5, unit="s"),
            "ONLINE64": Goal(4_760, 5_200, 64),
            "ONLINE256": Goal(5_800, 6_400, 256),
            **_latencies("ONLINE64", ttft=(547, 799), tpot=(8.29, 11.9), itl=(6.52, 124)),
            **_latencies("ONLINE256", ttft=(1552, 3363), tpot=(24.1, 39.2), itl=(18.3, 201)),
        },
        {1: 4.07, 8: 4.12, 32: 4.25, 64: 4.36, 128: 4.80, 256: 7.09},
    ),
}


class Comparison(NamedTuple):
    """`ratio` to vLLM, `goal_ratio` to the goal: above 1 is in our favour. `machine` is how much
    longer the linear layers of as many rows take here than where vLLM ran, and the scaled ones are
    what vLLM and the goal would be here if everything took as much longer."""

    workload: str
    value: float
    vllm: float
    goal: float | None
    ratio: float
    goal_ratio: float | None
    machine: float | None
    ratio_scaled: float | None


def compare(row: Row, shape: ShapeGoals, linear_ms: Mapping[int, float]) -> Comparison | None:
    """None for a row that nothing is known to compare with."""
    goal = shape.goals.get(row.workload)
    value = None if goal is None else _value(row, goal.unit)
    return None if value is None else compare_value(row.workload, value, shape, linear_ms)


def _value(row: Row, unit: Unit) -> float | None:
    match row:
        case ThroughputRun(repeat=0):
            return row.seconds if unit == "s" else row.output_throughput
        case LatencyFigure(workload="W4" | "W5", figure="first token"):
            return None
        case LatencyFigure():
            # Of two readings of a step the first is up to 1.3 times higher; vLLM's are second ones.
            return row.values_ms[-1] if row.workload.startswith("STEP") else row.median_ms
    return None


def compare_value(
    workload: str, value: float, shape: ShapeGoals, linear_ms: Mapping[int, float]
) -> Comparison | None:
    """`value` is in the unit of the workload's goal. None if nothing is known of the workload."""
    goal = shape.goals.get(workload)
    if goal is None:
        return None

    def over(reference: float) -> float:
        return value / reference if goal.unit == "tok/s" else reference / value

    ratio, machine = over(goal.vllm), _machine(goal.rows, shape, linear_ms)
    return Comparison(
        workload,
        value,
        goal.vllm,
        goal.ours,
        ratio,
        None if goal.ours is None else over(goal.ours),
        machine,
        None if machine is None else ratio * machine,
    )


def _machine(rows: int | None, shape: ShapeGoals, linear_ms: Mapping[int, float]) -> float | None:
    if rows is None or rows not in linear_ms:
        return None
    return linear_ms[rows] / shape.linear_layers_ms[rows]


def comparison_line(compared: Comparison | None) -> str:
    """The header for None."""
    if compared is None:
        names = ("ours", "vLLM", "goal", "x vLLM", "x goal", "machine", "x scaled")
        return f"{'workload':<{_NAME_CHARS}}" + "".join(f"{name:>11}" for name in names)
    cells = (compared.value, *compared[2:])
    shown = "".join(f"{'-' if cell is None else format(cell, '.2f'):>11}" for cell in cells)
    return f"{compared.workload:<{_NAME_CHARS}}{shown}"


def linear_layers_line(times_ms: Mapping[int, float]) -> str:
    shown = "  ".join(f"{rows}: {ms:.3f}" for rows, ms in times_ms.items())
    return f"linear layers through cuBLAS, ms at rows  {shown}"

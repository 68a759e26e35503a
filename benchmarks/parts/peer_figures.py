"""What vLLM 0.26 does with the offline workloads on one H200, what we aim at, and how a figure of
ours compares.

bfloat16, random weights, defaults otherwise (FlashAttention 3, CUDA graphs, asynchronous
scheduling). Steps of the small shape differ by up to 30% between machines, and the linear layers
through cuBLAS with them, so those of the machine that gave the figures stand beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from pagemesh.bench.offline import LatencyFigure, ThroughputRun
from pagemesh.bench.report_local import Row

FIRST_TOKEN: Final = "first token"


class Goal(NamedTuple):
    """Output tokens a second, or milliseconds a step or token of `rows` rows. None: not measured,
    or nothing aimed at."""

    vllm: float
    ours: float | None = None
    rows: int | None = None


class ShapeGoals(NamedTuple):
    """Of one model shape, by workload; and the milliseconds of all its linear layers by rows."""

    goals: Mapping[str, Goal]
    linear_layers_ms: Mapping[int, float]


def _steps(vllm: Mapping[int, float], ours: Mapping[int, float]) -> dict[str, Goal]:
    return {f"STEP{rows}": Goal(ms, ours.get(rows), rows) for rows, ms in vllm.items()}


GOALS: Final[Mapping[str, ShapeGoals]] = {
    "qwen3-0.6b": ShapeGoals(
        {
            "W1": Goal(20_860, 24_000),
            "W1greedy": Goal(20_668),
            **_steps(
                {1: 2.4, 8: 2.4, 32: 2.3, 64: 2.7, 128: 4.5, 256: 6.6}, {1: 1.2, 64: 1.5, 256: 3.0}
            ),
            "W4": Goal(2.4, rows=1),
        },
        {1: 0.95, 8: 0.77, 32: 0.80, 64: 0.82, 128: 0.86, 256: 0.95},
    ),
    "llama31-8b": ShapeGoals(
        {
            **_steps(
                {1: 4.9, 8: 5.1, 32: 5.4, 64: 5.9, 128: 7.0, 256: 10.9},
                {64: 5.0, 128: 5.7, 256: 8.6},
            ),
            "W2": Goal(10_252),
            "W4": Goal(4.89, 4.2, 1),
            "W5": Goal(5.5, 4.8, 32),
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
    match row:
        case ThroughputRun(repeat=0) if goal is not None:
            value, larger_is_better = row.output_throughput, True
        case LatencyFigure(figure=figure) if goal is not None and figure != FIRST_TOKEN:
            # Of two readings of a step the first is up to 1.3 times higher; vLLM's are second ones.
            is_step = row.workload.startswith("STEP")
            value, larger_is_better = row.values_ms[-1] if is_step else row.median_ms, False
        case _:
            return None

    def over(reference: float) -> float:
        return value / reference if larger_is_better else reference / value

    ratio, machine = over(goal.vllm), _machine(goal.rows, shape, linear_ms)
    return Comparison(
        row.workload,
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
        return f"{'workload':<12}" + "".join(f"{name:>11}" for name in names)
    cells = (compared.value, *compared[2:])
    shown = "".join(f"{'-' if cell is None else format(cell, '.2f'):>11}" for cell in cells)
    return f"{compared.workload:<12}{shown}"

"""Tables of what a decode step consists of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from parts.step_notes import Failed, Lateness, Outcome, PlainSteps, Task
from parts.step_trace import Named, Split

Outcomes = Mapping[Task, Outcome]

_MOST_KERNELS: Final = 16
_MOST_CALLS: Final = 8
_MOST_GAPS: Final = 6
_NAME_CHARS: Final = 84
_COLUMNS: Final = (
    "rows", "step ms", "median", "p99", "graph ms", "busy ms", "kernels", "idle", "launches",
    "launch ms", "its CPU", "plan CPU", "graph us",
)  # fmt: skip


def report_lines(outcomes: Outcomes) -> Iterator[str]:
    """One row a batch size, then what each step consists of."""
    plain = {task.rows: one for task, one in outcomes.items() if isinstance(one, PlainSteps)}
    splits = {task.rows: one for task, one in outcomes.items() if isinstance(one, Split)}
    yield "".join(f"{name:>10}" for name in _COLUMNS)
    for rows, steps in plain.items():
        yield _row(steps, splits.get(rows))
    for rows, steps in plain.items():
        yield from _waiting_lines(steps, splits.get(rows))
        if steps.services_cpu_ms:
            shown = "  ".join(f"{name} {ms:.3f}" for name, ms in steps.services_cpu_ms.items())
            yield f"{rows:10} rows, CPU ms a token: {shown}"
    for rows, split in splits.items():
        yield from _split_lines(rows, split)
    for task, outcome in outcomes.items():
        if isinstance(outcome, Failed):
            yield outcome_line(task, outcome)


def outcome_line(task: Task, outcome: Outcome) -> str:
    """An outcome in few words."""
    match outcome:
        case PlainSteps():
            words = f"{outcome.mean_ms:.3f} ms a step (median {outcome.median_ms:.3f})"
        case Split():
            words = f"busy {outcome.busy_ms:.3f} ms a step"
        case Failed():
            words = f"{outcome.reason} ({outcome.trace})"
    return f"{task.name}: {words}"


def idle_share(steps: PlainSteps, split: Split) -> float:
    """Of the step as it is without a profiler. Below 0 if the traced kernels took longer."""
    return 1 - split.busy_ms / steps.mean_ms


def graph_launch_us(split: Split) -> float:
    """Of the host, per step."""
    return sum(call.us_per_step for call in split.host_calls if call.name == "cudaGraphLaunch")


def _row(steps: PlainSteps, split: Split | None) -> str:
    times = (steps.mean_ms, steps.median_ms, steps.p99_ms)
    host = (steps.launch_ms, steps.launch_cpu_ms, steps.landing_thread_cpu_ms)
    device, graph = "".join(f"{'-':>10}" for _ in range(4)), f"{'-':>10}"
    if split is not None:
        busy = f"{split.busy_ms:10.3f}{split.kernel_ms:10.3f}"
        device = f"{busy}{idle_share(steps, split):10.1%}{split.launches:10.1f}"
        graph = f"{graph_launch_us(split):10.1f}"
    alone = f"{'-':>10}" if steps.graph_ms is None else f"{steps.graph_ms:10.3f}"
    return f"{steps.rows:10}{_cells(times)}{alone}{device}{_cells(host)}{graph}"


def _waiting_lines(steps: PlainSteps, split: Split | None) -> Iterator[str]:
    rows = f"{steps.rows:10} rows"
    traced = ""
    if split is not None:
        share, context = idle_share(steps, split), split.context_tokens or 0.0
        traced = f"; idle {share:.1%} of the step, busy traced from context {context:.0f} on"
    yield (
        f"{rows}, {steps.mean_rows:.1f} on average, from context {steps.context_tokens:.0f} on, "
        f"{steps.others} other steps in between{traced}"
    )
    yield f"{rows}, order of a step {_late(steps.frames)}"
    yield f"{rows}, launch of a step {_late(steps.launches)}"


def _late(late: Lateness) -> str:
    return (
        f"after the landing of the one before: {late.late_share:.1%} of them, ms a step "
        f"{late.mean_ms:.3f}, p90 {late.p90_ms:.3f}, p99 {late.p99_ms:.3f}, "
        f"longest {late.longest_ms:.3f}; the others {late.early_ms:.3f} earlier"
    )


def _cells(values: tuple[float, ...]) -> str:
    return "".join(f"{value:10.3f}" for value in values)


def _split_lines(rows: int, split: Split) -> Iterator[str]:
    yield (
        f"\n{rows} rows, per step of {split.steps} traced: wall {split.wall_ms:.3f} ms, gaps "
        f"between steps {split.gaps_between_steps_ms:.3f}, within {split.gaps_within_steps_ms:.3f}"
        f" (host launching during {split.idle_while_launching_ms:.3f} of both)"
    )
    yield from _named_lines("kernels and copies", split.kernels[:_MOST_KERNELS])
    yield from _named_lines("calls while launching", split.host_calls[:_MOST_CALLS])
    yield from _named_lines("gaps", split.gaps[:_MOST_GAPS])
    for gap in split.largest_gaps[:_MOST_GAPS]:
        calls = ", ".join(f"{name} {us:.0f}" for name, us in gap.calls.items())
        where = "between steps" if gap.between_steps else "within a step"
        yield (
            f"  gap of {gap.us:6.0f} us {where}, launching for {gap.in_launch_us:.0f} of it "
            f"({calls or 'no call'}); {_short(gap.before, 32)} → {_short(gap.after, 32)}"
        )


def _named_lines(title: str, rows: list[Named]) -> Iterator[str]:
    yield f"{'us a step':>11}{'a step':>9}  {title}"
    for row in rows:
        yield f"{row.us_per_step:11.1f}{row.per_step:9.1f}  {_short(row.name, _NAME_CHARS)}"


def _short(name: str, n_chars: int) -> str:
    return name if len(name) <= n_chars else f"{name[: n_chars - 1]}…"

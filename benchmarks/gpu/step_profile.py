"""Where a decode step goes: device busy, host and idle, by kernel.

    python benchmarks/gpu/step_profile.py qwen3-0.6b --batch 1 64 256 --out DIR
    python benchmarks/gpu/step_profile.py llama31-8b --mesh --batch 1 32 256 --out DIR

MODEL is a shape by name (see parts/model_shapes.py) or what `pagemesh serve` takes; every setting
is a flag. For each batch size that many requests of `--context` prompt tokens decode together. Once
the worker sees a steady batch (all have begun, and enough steps in a row were nothing but decodes
of at least 95% of them), `--steps` of them are timed as they are. Then, in a second round,
`--traced-steps` of them run under torch's profiler. Both rounds of a batch begin at the same mean
context; in a mesh, whose streams begin one after the other, that is a token for each row later.

The profiler makes launches slower, so the step's time comes from the first round and the device's
from the second: idle = 1 - busy / step. The gaps of the second round tell where the device waits,
not how long. "graph ms" needs no profiler: it is the step's CUDA graph alone, launched so that the
device never waits; what a step takes beyond it is the host, the copies and what is not in the
graph. "launch ms" is the launching thread inside `Runner.launch`, "plan CPU" the thread that plans
and takes in results (in the mesh it takes in results only). `--mesh` measures the same in the
worker process of a whole mesh, under the load of `pagemesh bench serve`.

A line for each batch tells how long the worker waited: for the order of its next step, counted from
the landing of the step before, where nothing else was queued; and until that step was launched. If
orders come late, `--run-ahead-depth` is too small; if they come early and launches late, the host
of the worker is the limit.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from parts.profiled_engine import profile_offline
from parts.shape_args import parse_shape_args
from parts.step_notes import Outcome, PlainSteps, Task
from parts.step_report import Outcomes, graph_launch_us, idle_share, outcome_line, report_lines
from parts.step_trace import Split

from pagemesh.bench.engine import engine_settings
from pagemesh.bench.environment import environment
from pagemesh.shared.settings import Settings


def add_options(group: Any) -> None:
    group.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    group.add_argument("--context", type=int, default=128, help="prompt tokens of a request")
    group.add_argument("--steps", type=int, default=100)
    group.add_argument("--traced-steps", type=int, default=30, help="0: no profiler")
    group.add_argument("--mesh", action="store_true", default=False)
    group.add_argument("--patience-s", type=float, default=15.0, help="in a mesh, for each batch")
    group.add_argument("--keep-traces", action="store_true", default=False)
    group.add_argument("--out", type=Path, default=Path("step-profile"), metavar="DIR")


def planned(args: Namespace) -> Iterator[Task]:
    """Nothing is timed once the profiler has been on."""
    for rows in args.batch:
        yield Task(rows, "plain", args.steps)
    for rows in args.batch if args.traced_steps else ():
        yield Task(rows, "profile", args.traced_steps)


def measure(args: Namespace, settings: Settings) -> Outcomes:
    tasks, keep = list(planned(args)), args.keep_traces
    if args.mesh:
        # Late: a mesh needs packages that an engine alone does not.
        from parts.profiled_mesh import Observation, profile_mesh

        how = Observation(args.context, args.patience_s, args.out, keep)
        return asyncio.run(profile_mesh(settings, tasks, how, show))
    return profile_offline(settings, tasks, args.context, args.out, keep=keep)


def show(task: Task, outcome: Outcome) -> None:
    """At once: a run may be cut off."""
    print(outcome_line(task, outcome), flush=True)


def figures(args: Namespace, settings: Settings, outcomes: Outcomes) -> dict[str, Any]:
    plain = {task.rows: one for task, one in outcomes.items() if isinstance(one, PlainSteps)}
    splits = {task.rows: one for task, one in outcomes.items() if isinstance(one, Split)}
    both = plain.keys() & splits.keys()
    return {
        "where": "mesh" if args.mesh else "offline",
        "context": args.context,
        "idle": {rows: idle_share(plain[rows], splits[rows]) for rows in both},
        "graph_launch_us": {rows: graph_launch_us(split) for rows, split in splits.items()},
        "outcomes": {task.name: outcome for task, outcome in outcomes.items()},
        "settings": engine_settings(settings),
        "environment": environment(),
    }


def main() -> None:
    args, settings = parse_shape_args("step_profile", __doc__, add_options)
    args.out.mkdir(parents=True, exist_ok=True)
    outcomes = measure(args, settings)
    print("\n".join(report_lines(outcomes)))
    where = "mesh" if args.mesh else "offline"
    name = f"step-profile-{Path(settings.model.model).name}-{where}.json"
    encoded = msgspec.json.encode(figures(args, settings, outcomes))
    (args.out / name).write_bytes(msgspec.json.format(encoded, indent=1))


if __name__ == "__main__":
    main()

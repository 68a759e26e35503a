"""Configurations of a decode step chosen in place: whole steps are timed, one choice is changed.

    python benchmarks/gpu/tune_step.py llama31-8b --rows 64 128 256 --context 192
    python benchmarks/gpu/tune_step.py llama31-8b --rows 64 128 256 --compile-only

MODEL is a shape by name (parts/model_shapes.py) or a folder with a config.json; weights, pages and
tokens are random. The kernels of a step overlap, and share shared memory, caches and power, so what
they take alone does not add up to what they take together. For each number of rows one CUDA graph
runs from the rows' inputs to the logits, as the worker's does. First parts are left out, or run
alone. Then, choice by choice, alternatives are held against the present step, in turns; what is
faster by more than the noise is kept, until a pass over all choices changes nothing or --seconds
are over. What does not compile or launch, or gives other logits, is skipped with a line. Code is
compiled in other processes meanwhile; --compile-only does that for all first alternatives.

Up to 64 rows the order of a layer's sums stays as it is, unless --order is given. Configurations of
norm, rope_store and the cuts of attention must be the same for all numbers of rows: take what is
good for all.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from parts.agreement import relative_error
from parts.config_text import show
from parts.decode_step import DecodeStep
from parts.model_shapes import model_folder
from parts.step_candidates import Space
from parts.step_choices import SWITCHED, Choices, Shape
from parts.step_compiler import StepCompiler, Steps, reason
from parts.step_tuner import Tuner
from parts.turns import Gain, replay_ms
from torch import Tensor
from torch.cuda import CUDAGraph

LINEARS = ("qkv", "o", "gate_up", "down", "head")
SMALL = ("norm", "rope_store", "silu", "embed", "gather")
ATTENTION = ("attention", "plan")
WARM_UP_MS = 300
LOAD_MS = 1500
TURNS = 30
ABLATION_TURNS = 10
MAX_DIFFERENCE = 0.2
"""||logits - present logits|| / ||present logits||: other roundings grow through the layers."""
CARD_QUERY = "clocks.sm,clocks.mem,power.draw,clocks_event_reasons.active"


def parts_left_out() -> Iterator[tuple[str, frozenset[str]]]:
    """Attention without its plan would read wherever an old one says."""
    every = {*LINEARS, *SMALL, *ATTENTION}
    for part in (*LINEARS, "norm", "rope_store", "attention"):
        yield f"without {part}", frozenset({part})
    yield "without attention, plan", frozenset(ATTENTION)
    yield "without linear layers", frozenset(LINEARS)
    yield "without norm, rope_store", frozenset({"norm", "rope_store"})
    yield "linear layers alone", frozenset(every - {*LINEARS, "silu"})
    yield "attention, plan alone", frozenset(every - {*ATTENTION})
    yield "norm, rope_store alone", frozenset(every - {"norm", "rope_store"})
    yield "linear layers, norm", frozenset(every - {*LINEARS, "silu", "norm"})
    yield "attention, rope_store", frozenset(every - {*ATTENTION, "rope_store"})


def ablate(step: DecodeStep, rows: int, present: Choices, graph: CUDAGraph) -> None:
    print("  part                          step ms   difference us")
    for name, skip in parts_left_out():
        print_difference(name, graph, step.capture(rows, present, skip))
    serial = present | {f"pdl:{kind}": False for kind in SWITCHED}
    print_difference("no kernel overlaps", graph, step.capture(rows, serial))
    linears = step.capture(rows, present, frozenset({*SMALL, *ATTENTION} - {"silu"}))
    for name, loaded in {"whole step": graph, "linear layers": linears}.items():
        print(f"  {name}, {CARD_QUERY}: {card_under_load(loaded)}", flush=True)


def print_difference(name: str, graph: CUDAGraph, other: CUDAGraph) -> None:
    whole, without = map(statistics.median, replay_ms([graph, other], ABLATION_TURNS))
    print(f"  {name:28}{without:9.3f}{(whole - without) * 1e3:16.0f}", flush=True)


def card_under_load(graph: CUDAGraph) -> str:
    """Clocks and power while the graph runs, and why the driver holds the clocks back."""
    for _ in range(replays_in(LOAD_MS, graph)):
        graph.replay()
    command = ["nvidia-smi", f"--query-gpu={CARD_QUERY}", "--format=csv,noheader", "-i", "0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        text = done.stdout.strip() or done.stderr.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        text = reason(error)
    torch.cuda.synchronize()
    return text


def replays_in(ms: float, graph: CUDAGraph) -> int:
    """At least 3."""
    [[once_ms]] = replay_ms([graph], 1)
    return max(3, int(ms / once_ms))


class CardBench:
    """A `Bench` on the card."""

    def __init__(
        self, step: DecodeStep, rows: int, present: Choices, compiler: StepCompiler
    ) -> None:
        self._step, self._rows, self._compiler = step, rows, compiler
        self.graph = self._candidate = step.capture(rows, present)
        self._logits = self._replayed(self.graph)

    def expect(self, choices: Choices, changed: str) -> None:
        self._compiler.start(self._rows, choices, changed, soon=True)

    def prepare(self, choices: Choices, changed: str) -> str | None:
        failure = self._compiler.failure(self._rows, choices, changed)
        if failure is not None:
            return failure
        try:
            self._candidate = self._step.capture(self._rows, choices)
        except Exception as error:
            torch.cuda.synchronize()  # raises what the device cannot recover from
            return reason(error)
        return None

    def gain(self, turns: int) -> Gain:
        return Gain.of(*replay_ms([self.graph, self._candidate], turns))

    def refusal(self) -> str | None:
        difference = relative_error(self._replayed(self._candidate), self._logits)
        return None if difference < MAX_DIFFERENCE else f"logits differ by {difference:.2g}"

    def accept(self) -> None:
        self.graph = self._candidate

    def _replayed(self, graph: CUDAGraph) -> Tensor:
        self._step.logits.fill_(torch.nan)
        graph.replay()
        return self._step.logits[: self._rows].float()


def spread_text(times: list[float]) -> str:
    low, _, high = statistics.quantiles(times, n=4)
    return f"{statistics.median(times):.3f} ms (quartiles {low:.3f}, {high:.3f})"


def measure(
    step: DecodeStep, rows: int, compiler: StepCompiler, args: argparse.Namespace
) -> Choices:
    present = step.shape.present(rows)
    print(f"\n{rows} rows of {args.context} tokens", flush=True)
    bench = CardBench(step, rows, present, compiler)
    first = bench.graph
    replay_ms([first], replays_in(WARM_UP_MS, first))
    for _ in range(2):
        [times] = replay_ms([first], TURNS)
        print(f"  present: {spread_text(times)}")
    ablate(step, rows, present, first)
    compiler.wait(rows)
    choices = tuned(bench, Space(step.shape, rows, args.order), present, args.seconds)
    before, after = replay_ms([first, bench.graph], TURNS)
    print(f"  before: {spread_text(before)}\n  after:  {spread_text(after)}")
    for name, value in choices.items():
        if value != present[name]:
            print(f"  {name} = {show(value)}")
    return choices


def tuned(bench: CardBench, space: Space, present: Choices, seconds: float) -> Choices:
    start = perf_counter()
    say = partial(print, flush=True)
    tuner = Tuner(bench, space, present, deadline_s=start + seconds, say=say)
    choices = tuner.run()
    print(f"  {tuner.tried} tried in {perf_counter() - start:.0f} s")
    return choices


def print_tables(shape: Shape, found: dict[int, Choices]) -> None:
    """Entries for the tables of kernels/gpu/skinny_config.py, and all else that was chosen."""
    print("\n    # kernels/gpu/skinny_config.py")
    for layer in shape.linears:
        print(f"    ({layer.n}, {layer.k}): {{  # {layer.name}")
        for rows, choices in found.items():
            print(f"        {rows}: {show(choices[layer.name])},")
        print("    },")
    others: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rows, choices in found.items():
        for name in choices.keys() - set(LINEARS):
            others[name][show(choices[name])].append(rows)
    for name, values in sorted(others.items()):
        print(f"    {name}: {'; '.join(f'{value} at {rows}' for value, rows in values.items())}")


def expect_all(compiler: StepCompiler, shape: Shape, args: argparse.Namespace) -> None:
    for rows in args.rows:
        present, space = shape.present(rows), Space(shape, rows, args.order)
        names = space.names(present)
        compiler.start(rows, present, names[0])
        for name in names:
            for value in space.alternatives(name, present):
                compiler.start(rows, present | {name: value}, name)


def report_compiled(compiler: StepCompiler) -> None:
    failures = [future.result() for future in compiler.started.values()]
    for failure in sorted({each for each in failures if each is not None}):
        print(f"  {failures.count(failure)} x {failure}")
    print(f"{len(failures)} steps compiled", flush=True)


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--context", type=int, default=192, help="tokens of each sequence")
    parser.add_argument("--seconds", type=float, default=60, help="for each number of rows")
    parser.add_argument("--order", action="store_true", help="sums may change order at few rows")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--processes", type=int, default=14)
    return parser.parse_args()


def main() -> None:
    args, start = parsed_arguments(), perf_counter()
    folder = model_folder(args.model, Path(tempfile.gettempdir()) / "pagemesh-shapes")
    steps = Steps(folder, max(args.rows), args.context)
    compiler = StepCompiler.of(steps, args.processes)
    expect_all(compiler, steps.shape, args)
    if args.compile_only:
        report_compiled(compiler)
        print(f"after {perf_counter() - start:.0f} s")
        return
    torch.cuda.set_stream(torch.cuda.Stream())
    step = steps.on(torch.device("cuda", torch.cuda.current_device()))
    gc.freeze()  # a capture collects garbage first: little of it, so
    found = {}
    for rows in args.rows:
        found[rows] = measure(step, rows, compiler, args)
        print(f"  after {perf_counter() - start:.0f} s", flush=True)
    print_tables(step.shape, found)
    compiler.close()


if __name__ == "__main__":
    main()

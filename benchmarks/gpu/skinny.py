"""Linear layers for few rows: microseconds by layer, and all of a model's in one graph.

    python benchmarks/gpu/skinny.py --compile-only
    python benchmarks/gpu/skinny.py

Every configuration is held against torch's product, then launched over the weights of all layers of
the model (so that the L2 cache does not help) in one CUDA graph. The fastest are printed as entries
for the table in kernels/gpu/skinny_config.py: for 1 to 64 rows with the one order of sums that is
best over all of them. Then all linear layers and the head run in one graph: as the worker would
choose, as this sweep would, through cuBLAS, and with the better of the last two for each layer.
`--compile-only` fills Triton's cache from several processes, as the run itself does first.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from itertools import product
from multiprocessing import get_context
from time import perf_counter
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import linear

from pagemesh.kernels.activation import silu_mul
from pagemesh.kernels.gpu import skinny_tma
from pagemesh.kernels.gpu.launch import multiprocessors
from pagemesh.kernels.gpu.skinny import skinny_gate_up, skinny_launch, skinny_linear
from pagemesh.kernels.gpu.skinny_config import (
    Launch,
    SkinnyConfig,
    choose_config,
    choose_gated_config,
)
from pagemesh.kernels.linear import join_splits

DTYPE = torch.bfloat16
FEW_ROWS = [1, 8, 32, 64]
MORE_ROWS = [128, 256]
MAX_ERROR = 5e-3
"""||kernel - torch|| / ||torch||: bfloat16 rounds at 2e-3."""
SWEEP_LAUNCHES = 64
REPLAYS = 7
SLEEP_CYCLES = 100_000
"""Of the GPU before a timed graph, so that the graph is there when it is to start."""


@dataclass(frozen=True)
class Layer:
    name: str
    n: int
    k: int
    gated: bool = False
    splittable: bool = True


@dataclass(frozen=True)
class Model:
    name: str
    n_layers: int
    layers: tuple[Layer, ...]
    head: Layer


MODELS = [
    Model(
        "Qwen3-0.6B",
        28,
        (
            Layer("qkv", 4096, 1024),
            Layer("o", 1024, 2048),
            Layer("gate_up", 6144, 1024, gated=True, splittable=False),
            Layer("down", 1024, 3072),
        ),
        Layer("head", 151936, 1024, splittable=False),
    ),
    Model(
        "Llama-3.1-8B",
        32,
        (
            Layer("qkv", 6144, 4096),
            Layer("o", 4096, 4096),
            Layer("gate_up", 28672, 4096, gated=True, splittable=False),
            Layer("down", 4096, 14336),
        ),
        Layer("head", 128256, 4096, splittable=False),
    ),
]


def splits_of(layer: Layer, tiles: int, least: float, most: float) -> list[int]:
    """Those that make between `least` and `most` programs for each multiprocessor."""
    if not layer.splittable:
        return [1]
    sms = multiprocessors()
    allowed = [s for s in (1, 2, 4, 8) if layer.k >= 128 * s]
    return [s for s in allowed if least * sms <= tiles * s <= most * sms] or allowed[-1:]


def few_rows_configs(layer: Layer) -> Iterator[SkinnyConfig]:
    for block_n in (64, 128):
        tiles = -(-layer.n // block_n)
        for splits in splits_of(layer, tiles, 0.7, 3):
            base = partial(SkinnyConfig, block_n=block_n, splits=splits)
            yield base()
            yield base(programs=2)
            yield base(block_k=64)
            yield base(share=1)
    plain = partial(SkinnyConfig, tma=False, splits=splits_of(layer, -(-layer.n // 64), 0.7, 3)[0])
    yield plain(prefetch=0)
    yield plain()
    if layer.gated:
        yield plain(block_n=32, share=3)
        yield plain(block_n=16, share=4)
    else:
        yield SkinnyConfig(splits=plain().splits, share=3)


def more_rows_configs(layer: Layer, rows: int) -> Iterator[SkinnyConfig]:
    shapes = [(128, 8, 256), (128, 8, 128), (256, 8, 128), (64, 4, 128), (64, 4, 256)]
    for block_n, warps, block_rows in shapes:
        if block_rows > rows:
            continue
        tiles = -(-layer.n // block_n) * (rows // block_rows)
        base = partial(SkinnyConfig, block_n=block_n, warps=warps, block_rows=block_rows)
        for splits in splits_of(layer, tiles, 0.6, 2):
            yield base(splits=splits, block_k=64, share=1)
            if block_n * block_rows <= 128 * 128:
                yield base(splits=splits, block_k=64, share=2, programs=2)


def configs(layer: Layer, rows: int) -> list[SkinnyConfig]:
    if rows in FEW_ROWS:
        return list(few_rows_configs(layer))
    return list(more_rows_configs(layer, rows))


def own_choice(layer: Layer, rows: int) -> SkinnyConfig | None:
    sms = multiprocessors()
    if layer.gated:
        return choose_gated_config(rows, layer.n // 2, layer.k, DTYPE, sms)
    max_splits = 8 if layer.splittable else 1
    return choose_config(rows, layer.n, layer.k, DTYPE, sms, max_splits=max_splits)


@contextmanager
def dependent_launch(on: bool) -> Iterator[None]:
    """Without it the accelerator still loads, and nothing is fetched ahead."""
    with patch.object(skinny_tma, "pdl", lambda: on):
        yield


@dataclass(frozen=True)
class Variant:
    layer: Layer
    rows: int
    config: SkinnyConfig
    overlap: bool = True

    def launch(self) -> Launch:
        x = torch.empty(self.rows, self.layer.k, dtype=DTYPE, device="meta")
        w = torch.empty(self.layer.n, self.layer.k, dtype=DTYPE, device="meta")
        with dependent_launch(self.overlap):
            return skinny_launch(x, w, self.config, gated=self.layer.gated)

    def compile(self) -> None:
        self.launch().compile()

    def code(self) -> str:
        """Equal for variants that are the same code."""
        launch = self.launch()
        tiles = [getattr(argument, "block_shape", None) for argument in launch.arguments]
        return repr((launch.options, tiles, self.config.splits > 1))


def variants() -> list[Variant]:
    found: dict[str, Variant] = {}
    for model in MODELS:
        for layer, rows in product((*model.layers, model.head), FEW_ROWS + MORE_ROWS):
            for config in configs(layer, rows):
                variant = Variant(layer, rows, config)
                found.setdefault(variant.code(), variant)
            choice = own_choice(layer, rows)
            for overlap in (True, False) if choice else ():
                variant = Variant(layer, rows, choice, overlap)
                found.setdefault(variant.code(), variant)
    return list(found.values())


def compile_all(processes: int) -> None:
    todo = variants()
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(Variant.compile, todo, chunksize=4))
    print(f"{len(todo)} variants compiled", flush=True)


def run(layer: Layer, x: Tensor, w: Tensor, config: SkinnyConfig | None) -> Tensor:
    """Through cuBLAS without a configuration, then without the activation."""
    if config is None:
        return linear(x, w)
    if layer.gated:
        return skinny_gate_up(x, w, config=config)
    return skinny_linear(x, w, config=config)


def check(layer: Layer, x: Tensor, w: Tensor, config: SkinnyConfig, expected: Tensor) -> None:
    poison = torch.full((config.splits * expected.numel(),), torch.nan, device="cuda")
    del poison
    got = join_splits(run(layer, x, w, config), DTYPE)
    error = float((got.float() - expected.float()).norm() / expected.float().norm())
    if not error < MAX_ERROR:
        raise SystemExit(f"{layer.name} {config} at {len(x)} rows: relative error {error:.1e}")


def graph_us(work: Callable[[], None]) -> float:
    """Median over replays of a graph of what `work` launches."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = [_replay_us(graph) for _ in range(REPLAYS)]
    return statistics.median(times[1:])


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SLEEP_CYCLES)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000


def random(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=DTYPE, device="cuda").normal_()


@dataclass
class Weights:
    model: Model
    layers: list[list[Tensor]]
    """By layer of the model, then by linear layer in it."""
    head: Tensor

    @classmethod
    def of(cls, model: Model) -> Weights:
        layers = [
            [random(each.n, each.k).mul_(each.k**-0.5) for each in model.layers]
            for _ in range(model.n_layers)
        ]
        return cls(model, layers, random(model.head.n, model.head.k).mul_(model.head.k**-0.5))

    def of_layer(self, layer: Layer) -> list[Tensor]:
        if layer is self.model.head:
            return [self.head]
        return [each[self.model.layers.index(layer)] for each in self.layers]

    def nbytes(self) -> int:
        return self.head.nbytes + sum(w.nbytes for each in self.layers for w in each)


def layer_us(layer: Layer, x: Tensor, weights: list[Tensor], config: SkinnyConfig | None) -> float:
    launches = max(SWEEP_LAUNCHES * len(weights) // 32, 4)
    turns = [weights[index % len(weights)] for index in range(launches)]

    def work() -> None:
        for w in turns:
            run(layer, x, w, config)

    return graph_us(work) / launches


Times = dict[SkinnyConfig | None, float]


def sweep(weights: Weights, layer: Layer, rows: int) -> Times:
    """Microseconds by configuration; None is cuBLAS."""
    x = random(rows, layer.k)
    matrices = weights.of_layer(layer)
    expected = linear(x, matrices[0])
    expected = silu_mul(expected) if layer.gated else expected
    times: Times = {None: layer_us(layer, x, matrices, None)}
    candidates = [*configs(layer, rows), *filter(None, [own_choice(layer, rows)])]
    for config in dict.fromkeys(candidates):
        check(layer, x, matrices[0], config, expected)
        times[config] = layer_us(layer, x, matrices, config)
    return times


def show(config: SkinnyConfig | None) -> str:
    """As Python, without what is at its default."""
    if config is None:
        return "None"
    given = ((field.name, getattr(config, field.name), field.default) for field in fields(config))
    changed = ", ".join(f"{name}={value}" for name, value, default in given if value != default)
    return f"SkinnyConfig({changed})"


Order = tuple[int, bool]


def best(times: Times, order: Order | None = None) -> SkinnyConfig:
    """The fastest of our own, of those with such an order of sums if given."""
    own = [c for c in times if c is not None and order in (None, c.order)]
    return min(own, key=lambda config: times[config])


def best_order(few: dict[int, Times]) -> Order:
    """For all of few rows at once, by the sum of their times relative to the fastest."""
    totals: dict[Order, float] = defaultdict(float)
    for order in {c.order for times in few.values() for c in times if c is not None}:
        for times in few.values():
            totals[order] += times[best(times, order)] / times[best(times)]
    return min(totals, key=totals.__getitem__)


def report(layer: Layer, all_times: dict[int, Times]) -> dict[int, SkinnyConfig | None]:
    """Print what is best at each number of rows; return it."""
    few = {rows: all_times[rows] for rows in FEW_ROWS}
    order = best_order(few)
    chosen: dict[int, SkinnyConfig | None] = {}
    nbytes = layer.n * layer.k * DTYPE.itemsize
    for rows, times in all_times.items():
        chosen[rows] = best(times, order if rows in few else None)
        ranked = sorted((c for c in times if c is not None), key=lambda config: times[config])
        us, own_us = times[chosen[rows]], times[own_choice(layer, rows)]
        print(
            f"{layer.name:8}{rows:4} rows: {us:7.2f} us {nbytes / us / 1e3:5.0f} GB/s,"
            f" cuBLAS {times[None]:7.2f}, own choice {own_us:7.2f}:"
            f" {'; '.join(f'{times[c]:.2f} {show(c)}' for c in ranked[:5])}",
            flush=True,
        )
    # The entries of the table: one for 1 and 8 rows, nothing where cuBLAS is better with many.
    chosen[1] = chosen[8] = best({c: all_times[1][c] + all_times[8][c] for c in few[1]}, order)
    for rows in MORE_ROWS:
        chosen[rows] = min(all_times[rows], key=lambda config: all_times[rows][config])
    entries = {16: chosen[8]} | {rows: chosen[rows] for rows in (*FEW_ROWS[2:], *MORE_ROWS)}
    print(f"    ({layer.n}, {layer.k}): {{  # {layer.name}")
    for most_rows, config in entries.items():
        print(f"        {most_rows}: {show(config)},")
    print("    },", flush=True)
    return chosen


Plan = dict[str, SkinnyConfig | None]


def model_us(weights: Weights, rows: int, plan: Plan) -> float:
    model = weights.model
    inputs = {layer.k: random(rows, layer.k) for layer in (*model.layers, model.head)}

    def work() -> None:
        for matrices in weights.layers:
            for layer, w in zip(model.layers, matrices, strict=True):
                run(layer, inputs[layer.k], w, plan[layer.name])
        run(model.head, inputs[model.head.k], weights.head, plan["head"])

    return graph_us(work)


def measure(model: Model) -> None:
    weights = Weights.of(model)
    linears = (*model.layers, model.head)
    print(f"\n{model.name}: {weights.nbytes() / 1e9:.2f} GB of weights")
    times = {
        layer.name: {rows: sweep(weights, layer, rows) for rows in FEW_ROWS + MORE_ROWS}
        for layer in linears
    }
    chosen = {layer.name: report(layer, times[layer.name]) for layer in linears}
    print("\nall linear layers and the head in one graph, ms")
    for rows in FEW_ROWS + MORE_ROWS:
        swept: Plan = {name: by_rows[rows] for name, by_rows in chosen.items()}
        cublas: Plan = dict.fromkeys(swept)
        own: Plan = {layer.name: own_choice(layer, rows) for layer in linears}
        mixed: Plan = {
            name: config if times[name][rows][config] < times[name][rows][None] else None
            for name, config in swept.items()
        }
        plans = {"own choice": own, "swept": swept, "cuBLAS": cublas, "mixed": mixed}
        cells = [f"{name} {model_us(weights, rows, p) / 1e3:.3f}" for name, p in plans.items()]
        with dependent_launch(False):
            cells.append(f"own choice without overlap {model_us(weights, rows, own) / 1e3:.3f}")
        print(f"{rows:4} rows: {', '.join(cells)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--model", choices=[model.name for model in MODELS])
    arguments = parser.parse_args()
    start = perf_counter()
    compile_all(arguments.processes)
    print(f"after {perf_counter() - start:.0f} s")
    if arguments.compile_only:
        return
    # A capture collects garbage first: little of it, so.
    gc.freeze()
    for model in MODELS:
        if arguments.model in (None, model.name):
            measure(model)
            print(f"after {perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()

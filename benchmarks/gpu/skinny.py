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
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from time import perf_counter
from unittest.mock import patch

import torch
from parts.agreement import poison, relative_error
from parts.card_clock import graph_us
from parts.config_text import show
from parts.linear_candidates import linear_configs
from parts.linear_choice import FEW_ROWS, MORE_ROWS, Times, chosen, present_config
from parts.linear_shapes import Linear, linears_of
from parts.model_shapes import SHAPES
from torch import Tensor
from torch.nn.functional import linear

from pagemesh.kernels.activation import silu_mul
from pagemesh.kernels.gpu import skinny_tma
from pagemesh.kernels.gpu.skinny import skinny_gate_up, skinny_launch, skinny_linear
from pagemesh.kernels.gpu.skinny_config import Launch, SkinnyConfig
from pagemesh.kernels.linear import join_splits
from pagemesh.worker_svc.models.config import DecoderConfig

DTYPE = torch.bfloat16
MODELS = {name: DecoderConfig.from_dict(raw) for name, raw in SHAPES.items()}
MAX_ERROR = 5e-3
"""||kernel - torch|| / ||torch||: bfloat16 rounds at 2e-3."""
SWEEP_LAUNCHES = 64

Plan = dict[str, SkinnyConfig | None]
"""By the name of a layer."""


@contextmanager
def dependent_launch(on: bool) -> Iterator[None]:
    """Without it the accelerator still loads, and nothing is fetched ahead."""
    with patch.object(skinny_tma, "pdl", lambda: on):
        yield


@dataclass(frozen=True)
class Variant:
    layer: Linear
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
    """Every code once."""
    every = [each for config in MODELS.values() for each in variants_of(config)]
    return list({variant.code(): variant for variant in every}.values())


def variants_of(config: DecoderConfig) -> Iterator[Variant]:
    for layer, rows in product(linears_of(config), FEW_ROWS + MORE_ROWS):
        for candidate in linear_configs(layer, rows):
            yield Variant(layer, rows, candidate)
        present = present_config(layer, rows, DTYPE)
        if present is not None:
            yield Variant(layer, rows, present)
            yield Variant(layer, rows, present, overlap=False)


def compile_all(processes: int) -> None:
    todo = variants()
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(Variant.compile, todo, chunksize=4))
    print(f"{len(todo)} variants compiled", flush=True)


def run(layer: Linear, x: Tensor, w: Tensor, config: SkinnyConfig | None) -> Tensor:
    """Through cuBLAS without a configuration, then without the activation."""
    if config is None:
        return linear(x, w)
    if layer.gated:
        return skinny_gate_up(x, w, config=config)
    return skinny_linear(x, w, config=config)


def check(layer: Linear, x: Tensor, w: Tensor, config: SkinnyConfig, expected: Tensor) -> None:
    whole_bytes = expected.nbytes if config.splits == 1 else 4 * expected.numel()
    poison(config.splits * whole_bytes)
    error = relative_error(join_splits(run(layer, x, w, config), DTYPE), expected)
    if not error < MAX_ERROR:
        raise SystemExit(f"{layer.name} {config} at {len(x)} rows: relative error {error:.1e}")


def random(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=DTYPE, device="cuda").normal_()


@dataclass
class Weights:
    config: DecoderConfig
    layers: list[list[Tensor]]
    """By layer of the model, then by linear layer in it."""
    head: Tensor

    @classmethod
    def of(cls, config: DecoderConfig) -> Weights:
        *inner, head = linears_of(config)
        layers = [[random_weight(each) for each in inner] for _ in range(config.n_layers)]
        return cls(config, layers, random_weight(head))

    @property
    def linears(self) -> list[Linear]:
        return linears_of(self.config)

    def of_layer(self, layer: Linear) -> list[Tensor]:
        index = self.linears.index(layer)
        return [self.head] if layer.name == "head" else [each[index] for each in self.layers]

    def nbytes(self) -> int:
        return self.head.nbytes + sum(w.nbytes for each in self.layers for w in each)


def random_weight(layer: Linear) -> Tensor:
    return random(layer.n, layer.k).mul_(layer.k**-0.5)


# -- the sweep ------------------------------------------------------------------------------------


def sweep(weights: Weights, layer: Linear, rows: int) -> Times:
    x = random(rows, layer.k)
    matrices = weights.of_layer(layer)
    expected = linear(x, matrices[0])
    expected = silu_mul(expected) if layer.gated else expected
    times: Times = {None: layer_us(layer, x, matrices, None)}
    candidates = [*linear_configs(layer, rows), *filter(None, [present_config(layer, rows, DTYPE)])]
    for config in dict.fromkeys(candidates):
        check(layer, x, matrices[0], config, expected)
        times[config] = layer_us(layer, x, matrices, config)
    return times


def layer_us(layer: Linear, x: Tensor, weights: list[Tensor], config: SkinnyConfig | None) -> float:
    launches = max(SWEEP_LAUNCHES * len(weights) // 32, 4)
    turns = [weights[index % len(weights)] for index in range(launches)]

    def work() -> None:
        for w in turns:
            run(layer, x, w, config)

    return graph_us(work) / launches


# -- tables ---------------------------------------------------------------------------------------


def print_times(
    layer: Linear, all_times: dict[int, Times], found: dict[int, SkinnyConfig | None]
) -> None:
    """What was found at each number of rows, and the fastest."""
    nbytes = layer.n * layer.k * DTYPE.itemsize
    for rows, times in all_times.items():
        us, present_us = times[found[rows]], times[present_config(layer, rows, DTYPE)]
        ranked = sorted((c for c in times if c is not None), key=times.__getitem__)
        fastest = "; ".join(f"{times[config]:.2f} {show(config)}" for config in ranked[:5])
        print(
            f"{layer.name:8}{rows:4} rows: {us:7.2f} us {nbytes / us / 1e3:5.0f} GB/s,"
            f" cuBLAS {times[None]:7.2f}, present {present_us:7.2f}: {fastest}"
        )


def print_entries(layer: Linear, found: dict[int, SkinnyConfig | None]) -> None:
    """Of the table in skinny_config.py."""
    entries = {16: found[8]} | {rows: found[rows] for rows in (*FEW_ROWS[2:], *MORE_ROWS)}
    print(f"    ({layer.n}, {layer.k}): {{  # {layer.name}")
    for most_rows, config in entries.items():
        print(f"        {most_rows}: {show(config)},")
    print("    },", flush=True)


def model_us(weights: Weights, rows: int, plan: Plan) -> float:
    *inner, head = weights.linears
    inputs = {layer.k: random(rows, layer.k) for layer in weights.linears}

    def work() -> None:
        for matrices in weights.layers:
            for layer, w in zip(inner, matrices, strict=True):
                run(layer, inputs[layer.k], w, plan[layer.name])
        run(head, inputs[head.k], weights.head, plan["head"])

    return graph_us(work)


def plans_of(
    layers: list[Linear], rows: int, times: dict[str, dict[int, Times]]
) -> dict[str, Plan]:
    swept: Plan = {name: chosen(by_rows)[rows] for name, by_rows in times.items()}
    return {
        "present": {layer.name: present_config(layer, rows, DTYPE) for layer in layers},
        "swept": swept,
        "cuBLAS": dict.fromkeys(swept),
        "mixed": {
            name: min((config, None), key=times[name][rows].__getitem__)
            for name, config in swept.items()
        },
    }


def measure(name: str) -> None:
    weights = Weights.of(MODELS[name])
    print(f"\n{name}: {weights.nbytes() / 1e9:.2f} GB of weights", flush=True)
    times: dict[str, dict[int, Times]] = {}
    for layer in weights.linears:
        times[layer.name] = {rows: sweep(weights, layer, rows) for rows in FEW_ROWS + MORE_ROWS}
        found = chosen(times[layer.name])
        print_times(layer, times[layer.name], found)
        print_entries(layer, found)
    print_models(weights, times)


def print_models(weights: Weights, times: dict[str, dict[int, Times]]) -> None:
    print("\nall linear layers and the head in one graph, ms")
    for rows in FEW_ROWS + MORE_ROWS:
        plans = plans_of(weights.linears, rows, times)
        cells = [
            f"{name} {model_us(weights, rows, plan) / 1e3:.3f}" for name, plan in plans.items()
        ]
        with dependent_launch(False):
            us = model_us(weights, rows, plans["present"])
        print(
            f"{rows:4} rows: {', '.join(cells)}, present without overlap {us / 1e3:.3f}", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--model", choices=list(MODELS))
    arguments = parser.parse_args()
    start = perf_counter()
    compile_all(arguments.processes)
    print(f"after {perf_counter() - start:.0f} s")
    if arguments.compile_only:
        return
    # A capture collects garbage first: little of it, so.
    gc.freeze()
    for name in MODELS:
        if arguments.model in (None, name):
            measure(name)
            print(f"after {perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()

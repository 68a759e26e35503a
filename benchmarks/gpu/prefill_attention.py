"""Prefill attention over pages: TFLOP/s of the products that a causal mask leaves, bfloat16.

    python benchmarks/gpu/prefill_attention.py
    python benchmarks/gpu/prefill_attention.py --compile-only

First everything is compiled, in several processes. Then the Triton kernel and the one for Hopper
are held against the reference in float32, and the bits of a prompt computed in chunks, in blocks of
another size, and again, against the whole. Then they run on scattered pages, launched many times in
one CUDA graph over more buffers than the L2 cache holds, next to torch's SDPA on contiguous keys
and values, and on pages that are gathered first. At the end come the configurations of the Hopper
kernel that are fastest, as the table in prefill_hopper.py has them.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import astuple, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from parts.agreement import relative_error
from parts.prefill_cells import (
    CASES,
    DTYPE,
    Attention,
    Layer,
    Prompts,
    chunks,
    prompts,
    step_inputs,
    teraflops,
)
from parts.prefill_libraries import contiguous, gathered
from torch.nn.attention import SDPBackend

from pagemesh.kernels.attention import paged_attention
from pagemesh.kernels.gpu import prefill_attention as triton_kernel
from pagemesh.kernels.gpu import prefill_hopper as hopper_kernel
from pagemesh.kernels.gpu.prefill_attention import PrefillConfig, prefill_attention
from pagemesh.kernels.gpu.prefill_hopper import HopperConfig, prefill_attention_hopper
from pagemesh.kernels.gpu.skinny_tma import is_hopper

# The first of each head dim has all its configurations measured, on pages of 16 tokens.
LAYERS = [Layer(32, 8, 128), Layer(9, 3, 64), Layer(16, 8, 128), Layer(32, 8, 64)]
WIDE = Layer(8, 2, 256)
"""Only the Triton kernel has it; held against the reference, not timed."""
BLOCK_TOKENS = [16, 64]
L2_BYTES = 60e6
LAUNCHES = 8
"""In a graph, at least."""
REPLAYS = 7
MAX_ERROR = 5e-3
"""||kernel - reference|| / ||reference||."""
COMPILERS = 14
WINDOW = 1000
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}

TRITON_CONFIGS = {
    64: [PrefillConfig(128, 64, 8, 3), PrefillConfig(128, 128, 8, 2)],
    128: [PrefillConfig(128, 128, 8, 2), PrefillConfig(128, 64, 8, 3)],
    256: [PrefillConfig(128, 64, 8, 2), PrefillConfig(64, 64, 4, 2)],
}
_NARROW, _WIDE = HopperConfig(stages=4), HopperConfig()
HOPPER_CONFIGS = {
    64: [
        _NARROW,
        replace(_NARROW, turns=False),
        replace(_NARROW, warpgroups=3),
        replace(_NARROW, warpgroups=3, turns=False),
        replace(_NARROW, query_stages=1),
    ],
    128: [
        _WIDE,
        replace(_WIDE, turns=False),
        replace(_WIDE, pack=False),
        replace(_WIDE, stages=3, query_stages=1),
        replace(_WIDE, tile_tokens=64, stages=4),
    ],
}


Choice = tuple[str, PrefillConfig | HopperConfig]
"""A kernel and its configuration."""


def kernels(head_dim: int) -> dict[str, Attention]:
    """As the product calls them."""
    named: dict[str, Attention] = {"triton": prefill_attention}
    if is_hopper() and head_dim in hopper_kernel.HEAD_DIMS:
        named["hopper"] = prefill_attention_hopper
    return named


def choices(head_dim: int) -> list[Choice]:
    """All that are measured."""
    listed: list[Choice] = [("triton", c) for c in TRITON_CONFIGS[head_dim]]
    if "hopper" in kernels(head_dim):
        listed += [("hopper", c) for c in HOPPER_CONFIGS[head_dim]]
    return listed


def same_bits(kernel: str, head_dim: int) -> list[Choice]:
    """What the product chooses, and what must sum in the same order: tiles of the same size."""
    if kernel == "triton":
        return [(kernel, triton_kernel.choose_config(DTYPE, head_dim, n)) for n in (1024, 1)]
    tile_tokens = hopper_kernel.choose_config(head_dim).tile_tokens
    return [(kernel, c) for c in HOPPER_CONFIGS[head_dim] if c.tile_tokens == tile_tokens]


def attention_of(choice: Choice) -> Attention:
    kernel, config = choice
    return partial(
        {"triton": prefill_attention, "hopper": prefill_attention_hopper}[kernel], config=config
    )


def choice_text(choice: Choice) -> str:
    kernel, config = choice
    if isinstance(config, HopperConfig):
        return f"{kernel} {config_text(config)}"
    return f"{kernel} {', '.join(map(str, astuple(config)))}"


def config_text(c: HopperConfig) -> str:
    marks = ("turns" if c.turns else "") + (" pack" if c.pack else "")
    return f"{c.tile_tokens}x{c.stages} q{c.query_stages} w{c.warpgroups} {marks}"


# -- correctness ----------------------------------------------------------------------------------


def checked() -> Iterator[tuple[Layer, int, int | None]]:
    """(layer, tokens of a page, window)."""
    for layer in (*LAYERS, WIDE):
        yield from ((layer, block_tokens, None) for block_tokens in BLOCK_TOKENS)
    for layer in (*LAYERS[:2], WIDE):
        yield from ((layer, block_tokens, WINDOW) for block_tokens in (16, 128))


def check() -> None:
    rows = [(1, 1), (130, 130), (0, 0), (700, 3001), (1000, 1000), (5, 4096), (33, 2049)]
    for layer, block_tokens, window in checked():
        batch = prompts([rows], layer, block_tokens)
        expected = reference(batch, window)
        for name, attention in kernels(layer.head_dim).items():
            batch.out.fill_(torch.nan)
            batch.run(attention, window)
            error = relative_error(batch.out, expected)
            assert error < MAX_ERROR, (name, layer, block_tokens, window, error)
    for layer in (*LAYERS, WIDE):
        check_bits(layer)
    print(f"as the reference (errors below {MAX_ERROR}), with the same bits in chunks", flush=True)


def reference(batch: Prompts, window: int | None) -> torch.Tensor:
    """In float32; what lies behind a row's last token is not used."""
    exact = (x.float() for x in (batch.q, batch.k_cache, batch.v_cache))
    return paged_attention(*exact, batch.steps[0], scale=batch.q.shape[2] ** -0.5, window=window)


def check_bits(layer: Layer) -> None:
    """Of a prompt in chunks, and twice in one piece with every configuration."""
    chunked = prompts(chunks(4000, 333), layer, BLOCK_TOKENS[0])
    whole = step_inputs([(4000, 4000)], chunked.steps[0].block_tables)
    for name, attention in kernels(layer.head_dim).items():
        chunked.run(attention)
        for choice in same_bits(name, layer.head_dim) * 2:
            out = torch.full_like(chunked.out, torch.nan)
            replace(chunked, out=out, steps=[whole]).run(attention_of(choice))
            assert torch.equal(out, chunked.out), (layer, choice)


# -- speed ----------------------------------------------------------------------------------------


def median_s(runs: list[Callable[[], object]]) -> float:
    """One run's time, from replays of a graph of all of them in turn."""
    for run in runs:
        run()
    graph = torch.cuda.CUDAGraph()
    n_runs = max(LAUNCHES, len(runs))
    with torch.cuda.graph(graph):
        for i in range(n_runs):
            runs[i % len(runs)]()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(REPLAYS):
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times) / n_runs / 1e3


def buffers(layer: Layer, block_tokens: int) -> list[list[Prompts]]:
    """Of every case, as many as do not fit the L2 cache together."""
    batches = []
    for steps in CASES.values():
        one = prompts(steps, layer, block_tokens)
        others = range(min(LAUNCHES, int(L2_BYTES // one.n_bytes)))
        batches.append([one, *(prompts(steps, layer, block_tokens) for _ in others)])
    return batches


def kernel_rates(
    layer: Layer, batches: list[list[Prompts]], named: dict[str, Attention]
) -> Iterator[tuple[str, list[float]]]:
    for name, attention in named.items():
        times = [median_s([partial(b.run, attention) for b in batch]) for batch in batches]
        yield name, rates(layer, times)


def library_rates(layer: Layer, batches: list[list[Prompts]]) -> Iterator[tuple[str, list[float]]]:
    for name, backend in BACKENDS.items():
        times = [library_s(contiguous, [steps], layer, backend) for steps in CASES.values()]
        yield f"{name}, contiguous", rates(layer, times)
        times = [
            library_s(gathered, [(b, steps) for b in batch], layer, backend)
            for steps, batch in zip(CASES.values(), batches, strict=True)
        ]
        yield f"{name}, gathered", rates(layer, times)


def library_s(
    call: Callable[..., Callable[[], object]],
    inputs: list[Any],
    layer: Layer,
    backend: SDPBackend,
) -> float:
    """NaN where the library does not take it."""
    with suppress(RuntimeError, ValueError, NotImplementedError):
        return median_s([call(one, layer, backend) for one in inputs])
    return math.nan


def rates(layer: Layer, times_s: list[float]) -> list[float]:
    """TFLOP/s in each case."""
    work = (teraflops(steps, layer) for steps in CASES.values())
    return [done / time_s for done, time_s in zip(work, times_s, strict=True)]


def sweep() -> None:
    cells = "".join(f"{name:>12}" for name in CASES)
    print(f"{'heads':12} page {'':28}{cells}   TFLOP/s")
    best: dict[int, str] = {}
    for layer in LAYERS:
        for block_tokens in BLOCK_TOKENS:
            batches = buffers(layer, block_tokens)
            if layer.head_dim in best:
                show(layer, block_tokens, kernel_rates(layer, batches, kernels(layer.head_dim)))
                continue
            listed = {choice_text(c): c for c in choices(layer.head_dim)}
            attentions = {text: attention_of(c) for text, c in listed.items()}
            reached = show(layer, block_tokens, kernel_rates(layer, batches, attentions))
            best[layer.head_dim] = fastest(reached, listed)
            show(layer, block_tokens, library_rates(layer, batches))
    print("\n".join(f"    {head_dim}: {entry}," for head_dim, entry in best.items()))


def show(
    layer: Layer, block_tokens: int, reached: Iterator[tuple[str, list[float]]]
) -> dict[str, list[float]]:
    """Print as they come, and keep."""
    kept = {}
    for what, teraflops_s in reached:
        kept[what] = teraflops_s
        cells = "".join(f"{rate:12.0f}" for rate in teraflops_s)
        print(f"{layer!s:12} {block_tokens:4} {what:28}{cells}", flush=True)
    return kept


def fastest(reached: dict[str, list[float]], listed: dict[str, Choice]) -> str:
    """Of the Hopper configurations, by the geometric mean of all cases."""
    means = {
        repr(config): statistics.geometric_mean(reached[text])
        for text, (kernel, config) in listed.items()
        if kernel == "hopper"
    }
    return max(means, key=lambda entry: means[entry], default="-")


# -- compiling ------------------------------------------------------------------------------------


def compile_variant(layer: Layer, block_tokens: int, choice: Choice, window: int | None) -> None:
    prompts([[(1, 1)]], layer, block_tokens).run(attention_of(choice), window)
    torch.cuda.synchronize()


def variants() -> Iterator[tuple[Layer, int, Choice, int | None]]:
    for layer, block_tokens, window in checked():
        for name in kernels(layer.head_dim):
            for choice in same_bits(name, layer.head_dim):
                if name == "triton" or choice[1] == hopper_kernel.choose_config(layer.head_dim):
                    yield layer, block_tokens, choice, window
    for layer in (*LAYERS, WIDE):
        for name in kernels(layer.head_dim):
            for choice in same_bits(name, layer.head_dim):
                yield layer, BLOCK_TOKENS[0], choice, None
    for layer in LAYERS[:2]:
        for choice in choices(layer.head_dim):
            yield layer, BLOCK_TOKENS[0], choice, None


def compile_all() -> None:
    start = time.monotonic()
    todo = list(dict.fromkeys(variants()))
    with ProcessPoolExecutor(COMPILERS, get_context("spawn")) as pool:
        list(pool.map(compile_variant, *zip(*todo, strict=True)))
    print(f"compiled {len(todo)} variants in {time.monotonic() - start:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--compile-only", action="store_true", help="fill Triton's cache")
    compile_all()
    if parser.parse_args().compile_only:
        return
    torch.manual_seed(0)
    check()
    sweep()


if __name__ == "__main__":
    main()

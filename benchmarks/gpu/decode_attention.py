"""Decode attention on a card: microseconds, GB/s and percent of a copy for (batch, context) cells.

    python benchmarks/gpu/decode_attention.py --compile-only   # fills Triton's cache
    python benchmarks/gpu/decode_attention.py                  # correctness, then all cells
    python benchmarks/gpu/decode_attention.py --sweep          # configurations at a few cells

Every launch reads pages scattered over one pool; small cells take turns on so many of them that no
page is still in the L2 cache. Launches are timed as replays of one CUDA graph, without the planning
kernels (once a step, timed apart). Bytes are those of K and V alone. A cell of at least 256k tokens
is marked < if it is below 85% of the copy; neighbours more than 15% apart are listed. Batches with
a common prefix are timed with each row computed by itself (alone) and with those that share pages
computed together: percent of a copy of the bytes of all rows, and of what differs.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import torch
from parts.agreement import relative_error
from parts.card_clock import copy_bytes_s
from parts.decode_cells import (
    DEVICE,
    DTYPE,
    Cell,
    Pool,
    Work,
    alone,
    extra_cells,
    plan_us,
    shared_cells,
    tuned,
)
from parts.decode_fit import fits
from torch import Tensor

from pagemesh.kernels.gpu.decode_attention import decode_attention
from pagemesh.kernels.gpu.decode_plan import DecodeConfig, Heads
from pagemesh.kernels.inputs import AttentionInputs

LAYERS = [Heads(8, 4, 128), Heads(8, 2, 128)]
BLOCK_TOKENS = [16, 64]
BATCHES = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256]
CONTEXTS = [128, 192, 512, 1024, 2048, 4096, 8192, 32768]
SWEPT_CELLS = [(256, 192), (256, 640), (64, 2048), (1, 8192), (32, 8192), (1, 256), (32, 384)]
POOL_TOKENS = 256 * 32768
MANY_TOKENS = 256 * 1024
MAX_ERROR = 6e-3
CHECKED_LENGTHS = [1, 192, 0, 700, 1023, 8192, 2048, 33, 31, 20000]
CHECKED_PREFIXED = [3000 + 11 * row for row in range(100)]
PLANNED_CELLS = [Cell.uniform(256, 192), Cell.uniform(256, 2048), Cell.uniform(1, 32768)]


# -- correctness ----------------------------------------------------------------------------------


def check(pool: Pool, heads: Heads) -> None:
    """Of rows of all lengths, and of rows with a common prefix, whose bits are those of rows that
    are computed one by one."""
    for window in (None, 1000):
        check_cell(Cell("check", CHECKED_LENGTHS), pool, heads, window)
    prefixed = Cell("check", CHECKED_PREFIXED, shared_tokens=2048)
    shared = check_cell(prefixed, pool, heads, None)
    assert torch.equal(shared, check_cell(prefixed, pool, heads, None, alone(tuned(heads))))


def check_cell(
    cell: Cell, pool: Pool, heads: Heads, window: int | None, config: DecodeConfig | None = None
) -> Tensor:
    inputs = cell.inputs(pool, 0)
    shape = (len(cell.lengths), heads.n_kv_heads * heads.group, heads.head_dim)
    generator = torch.Generator(DEVICE).manual_seed(0)
    q = torch.randn(shape, dtype=DTYPE, device=DEVICE, generator=generator)
    out = torch.full_like(q, torch.nan)
    decode_attention(q, pool.k, pool.v, inputs, scale=0.1, window=window, out=out, config=config)
    error = relative_error(out, exact(q, pool, inputs, scale=0.1, window=window))
    assert error < MAX_ERROR, (heads, window, error)
    return out


def exact(
    q: Tensor, pool: Pool, inputs: AttentionInputs, *, scale: float, window: int | None
) -> Tensor:
    """In float32, a row at a time."""
    out = torch.zeros_like(q, dtype=torch.float32)
    for row, length in enumerate(inputs.seq_lens.tolist()):
        if length:
            first = 0 if window is None else max(0, length - window)
            blocks = inputs.block_tables[row].long()
            k, v = (
                cache[blocks].transpose(1, 2).flatten(0, 1)[first:length].float()
                for cache in (pool.k, pool.v)
            )
            grouped = q[row].float().view(k.shape[1], -1, q.shape[2])
            weights = (torch.einsum("hgd,thd->hgt", grouped, k) * scale).softmax(-1)
            out[row] = torch.einsum("hgt,thd->hgd", weights, v).flatten(0, 1)
    return out


# -- tables ---------------------------------------------------------------------------------------

Speeds = dict[tuple[int, int], float]
"""Bytes a second by (batch, context)."""


def print_cells(whole: Pool, copied_bytes_s: float) -> None:
    for heads, block_tokens in itertools.product(LAYERS, BLOCK_TOKENS):
        pool = whole.paged(block_tokens)
        check(pool, heads)
        print(f"\n{heads}, block_tokens {block_tokens}, {tuned(heads)}")
        for cell in [*PLANNED_CELLS, *shared_cells()]:
            print(plan_text(cell, heads, pool))
        print("µs (% of copy)" + "".join(f"{context:>16}" for context in CONTEXTS))
        speeds: Speeds = {}
        for batch in BATCHES:
            speeds |= print_batch(batch, pool, heads, copied_bytes_s)
        print("more than 15% from a neighbour:", list(cliffs(speeds)) or "none")
        for cell in extra_cells():
            us = Work.of(cell, pool, heads).us(None)
            print(row_text(cell, us, pool, copied_bytes_s))
        for cell in shared_cells():
            print(shared_text(cell, Work.of(cell, pool, heads), copied_bytes_s))


def print_batch(batch: int, pool: Pool, heads: Heads, copied_bytes_s: float) -> Speeds:
    """At all contexts."""
    print(f"{batch:>14}", end="")
    speeds: Speeds = {}
    for context in CONTEXTS:
        us = Work.of(Cell.uniform(batch, context), pool, heads).us(None)
        speeds[batch, context] = batch * context * pool.token_bytes / us * 1e6
        part = speeds[batch, context] / copied_bytes_s
        low = "<" if batch * context >= MANY_TOKENS and part < 0.85 else " "
        print(f"{us:>9.1f} ({part:3.0%}){low}", end="", flush=True)
    print()
    return speeds


def row_text(cell: Cell, us: float, pool: Pool, copied_bytes_s: float) -> str:
    bytes_s = cell.tokens * pool.token_bytes / us * 1e6
    share = bytes_s / copied_bytes_s
    return f"{cell.name:>24} {us:>9.1f} µs {bytes_s / 1e9:>6.0f} GB/s {share:4.0%}"


def sharing(config: DecodeConfig) -> dict[str, DecodeConfig]:
    """Each row by itself, and those with the same pages together."""
    return {"alone": replace(config, share=False), "together": config}


def plan_text(cell: Cell, heads: Heads, pool: Pool) -> str:
    times = (
        f"{plan_us(cell, heads, pool, config):.1f} ({name})"
        for name, config in sharing(tuned(heads)).items()
    )
    return f"planning {cell.name:>18}: {', '.join(times)} µs"


def shared_text(cell: Cell, work: Work, copied_bytes_s: float) -> str:
    """Percent of a copy, of all bytes and of what differs."""
    times = {name: work.us(config) for name, config in sharing(tuned(work.heads)).items()}
    parts = []
    for name, us in times.items():
        copied = copied_bytes_s / 1e6 * us / work.pool.token_bytes
        parts.append(
            f"{us:.1f} ({name}: {cell.tokens / copied:.0%}, {cell.distinct_tokens / copied:.0%})"
        )
    return f"{cell.name:>24} {', '.join(parts)} µs"


def cliffs(speeds: Speeds) -> Iterator[str]:
    for one, other in neighbours():
        slow, fast = sorted((speeds[one], speeds[other]))
        if min(math.prod(one), math.prod(other)) >= MANY_TOKENS and slow < 0.85 * fast:
            yield f"{one}-{other}"


def neighbours() -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    for context in CONTEXTS:
        yield from (((a, context), (b, context)) for a, b in itertools.pairwise(BATCHES))
    for batch in BATCHES:
        yield from (((batch, a), (batch, b)) for a, b in itertools.pairwise(CONTEXTS))


# -- the sweep ------------------------------------------------------------------------------------


def candidates(heads: Heads) -> list[DecodeConfig]:
    """Shapes of programs, all else as tuned."""
    base = tuned(heads)
    every = (
        replace(
            base, tile_tokens=tile, num_warps=warps, num_stages=stages, programs_per_sm=programs
        )
        for tile, warps, stages, programs in itertools.product(
            [16, 32, 64, 128], [2, 4, 8], [2, 3, 4, 5], [1, 2, 3, 4, 5, 6]
        )
    )
    bounds = {"least_bytes": 96 * 1024, "least_warps": 8}
    return [config for config in every if fits(config, heads.head_dim, DTYPE, **bounds)]


def variations(config: DecodeConfig) -> list[DecodeConfig]:
    return [
        replace(config, chunk_tokens=chunk_tokens)
        for chunk_tokens in (128, 256, 384, 512)
        if chunk_tokens % config.tile_tokens == 0
    ]


def compile_one(variant: tuple[Heads, int, DecodeConfig]) -> None:
    """By running it on a small pool, with rows of several chunks: they might share some."""
    heads, block_tokens, config = variant
    pool = Pool.random(heads, 16 * block_tokens).paged(block_tokens)
    Work.of(Cell.uniform(2, 2 * config.chunk_tokens), pool, heads).us(config)


def compile_all(
    executor: ProcessPoolExecutor, variants: Iterable[tuple[Heads, int, DecodeConfig]]
) -> None:
    list(executor.map(compile_one, variants, chunksize=2))


def sweep(executor: ProcessPoolExecutor, whole: Pool, heads: Heads, best: int) -> None:
    """First the shapes of programs, then chunks for the best, then page sizes."""
    pool = whole.paged(16)
    shapes = candidates(heads)
    compile_all(executor, ((heads, 16, config) for config in shapes))
    ranked = rank(shapes, pool, heads, best)
    refined = [variant for config in ranked for variant in variations(config)]
    compile_all(executor, ((heads, 16, config) for config in refined))
    ranked = rank(refined, pool, heads, best)
    compile_all(executor, ((heads, n, config) for n in (32, 64) for config in ranked))
    for block_tokens in (32, 64):
        rank(ranked, whole.paged(block_tokens), heads, best)


def rank(configs: list[DecodeConfig], pool: Pool, heads: Heads, best: int) -> list[DecodeConfig]:
    """Prints the `best` by the geometric mean over the cells, and the best of each cell."""
    cells = [*(Cell.uniform(*cell) for cell in SWEPT_CELLS), extra_cells()[0]]
    works = [Work.of(cell, pool, heads) for cell in cells]
    times = {config: [work.us(config) for work in works] for config in configs}
    ranked = sorted(configs, key=lambda config: statistics.geometric_mean(times[config]))
    print(f"\n{heads}, block_tokens {pool.block_tokens}: µs")
    print(f"{'tile chunk warps stages programs':>35}" + "".join(f"{c.name:>18}" for c in cells))
    for config in ranked[: 2 * best]:
        print(config_text(config) + "".join(f"{us:>18.1f}" for us in times[config]))
    print("the best of each cell:")
    for number, cell in enumerate(cells):
        config = min(configs, key=lambda config: times[config][number])
        print(f"{config_text(config)} {cell.name:>18} {times[config][number]:.1f}", flush=True)
    return ranked[:best]


def config_text(config: DecodeConfig) -> str:
    return (
        f"{config.tile_tokens:>7} {config.chunk_tokens:>5} {config.num_warps:>5}"
        f" {config.num_stages:>6} {config.programs_per_sm:>8}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--best", type=int, default=4, help="configurations the sweep keeps")
    parser.add_argument("--processes", type=int, default=14)
    args = parser.parse_args()
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as executor:
        if args.compile_only:
            cells = [
                (heads, n, config)
                for heads in LAYERS
                for n in BLOCK_TOKENS
                for config in sharing(tuned(heads)).values()
            ]
            shapes = [(heads, 16, config) for heads in LAYERS for config in candidates(heads)]
            compile_all(executor, [*cells, *(shapes if args.sweep else [])])
            return
        copied_bytes_s = copy_bytes_s()
        print(f"{torch.cuda.get_device_name()}: copy {copied_bytes_s / 1e9:.0f} GB/s")
        whole = Pool.random(LAYERS[0], POOL_TOKENS)
        if args.sweep:
            for heads in LAYERS:
                sweep(executor, whole, heads, args.best)
        else:
            print_cells(whole, copied_bytes_s)


if __name__ == "__main__":
    main()

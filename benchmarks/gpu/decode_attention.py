"""Decode attention on a card: microseconds, GB/s and percent of a copy for (batch, context) cells.

    python benchmarks/gpu/decode_attention.py --compile-only   # fills Triton's cache
    python benchmarks/gpu/decode_attention.py                  # correctness, then all cells
    python benchmarks/gpu/decode_attention.py --sweep          # configurations at a few cells

Every launch reads pages scattered over one pool; small cells take turns on so many of them that no
page is still in the L2 cache. Launches are timed as replays of one CUDA graph, without the planning
kernel (once a step, timed apart). Bytes are those of K and V alone. A cell of at least 256k tokens
is marked < if it is below 85% of the copy; neighbours more than 15% apart are listed.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

import torch
from torch import Tensor

from pagemesh.kernels.gpu.decode_attention import choose_config, decode_attention
from pagemesh.kernels.gpu.decode_plan import DecodeConfig, Heads, plan_decode
from pagemesh.kernels.gpu.launch import multiprocessors
from pagemesh.kernels.inputs import AttentionInputs

DEVICE = "cuda"
DTYPE = torch.bfloat16
LAYERS = [Heads(8, 4, 128), Heads(8, 2, 128)]
BLOCK_TOKENS = [16, 64]
BATCHES = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256]
CONTEXTS = [128, 192, 512, 1024, 2048, 4096, 8192, 32768]
SWEPT_CELLS = [(256, 192), (256, 640), (64, 2048), (1, 8192), (32, 8192), (1, 256), (32, 384)]
POOL_TOKENS = 256 * 32768
COLD_BYTES = 400e6
"""A graph reads at least this much (several times the L2 cache) before it returns to a page."""
MAX_SETS = 128
LAUNCHES = 8
"""At least, in a graph."""
MANY_TOKENS = 256 * 1024
SHARED_BYTES = 227 * 1024
MAX_ERROR = 6e-3


@dataclass(frozen=True)
class Pool:
    k: Tensor
    v: Tensor
    order: Tensor
    """int32: the blocks, shuffled."""

    @classmethod
    def random(cls, heads: Heads, tokens: int) -> Pool:
        """Of pages of one token, to be seen with `paged`."""
        shape = (tokens, heads.n_kv_heads, 1, heads.head_dim)
        k, v = (torch.empty(shape, dtype=DTYPE, device=DEVICE).normal_() for _ in range(2))
        return cls(k, v, torch.empty(0))

    def paged(self, block_tokens: int) -> Pool:
        tokens, n_kv_heads, _, head_dim = self.k.shape
        blocks = tokens // block_tokens
        shape = (blocks, n_kv_heads, block_tokens, head_dim)
        order = torch.randperm(blocks, device=DEVICE).to(torch.int32)
        return Pool(self.k.view(shape), self.v.view(shape), order)

    @property
    def block_tokens(self) -> int:
        return self.k.shape[2]

    @property
    def token_bytes(self) -> int:
        return 2 * self.k.shape[1] * self.k.shape[3] * self.k.element_size()


@dataclass(frozen=True)
class Cell:
    name: str
    lengths: list[int]
    shared_tokens: int = 0
    """Of a prefix that all rows have in common."""

    @classmethod
    def uniform(cls, batch: int, context: int) -> Cell:
        return cls(f"{batch} x {context}", [context] * batch)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def inputs(self, pool: Pool, offset: int) -> AttentionInputs:
        """Rows on the pool's blocks from `offset` on, in its shuffled order."""
        spans = -(-max(self.lengths) // pool.block_tokens)
        rows = len(self.lengths)
        wanted = torch.arange(offset, offset + rows * spans, device=DEVICE) % len(pool.order)
        tables = pool.order[wanted].view(rows, spans)
        tables[:, : self.shared_tokens // pool.block_tokens] = tables[
            :1, : self.shared_tokens // pool.block_tokens
        ]
        return AttentionInputs(
            query_start=torch.arange(rows + 1, dtype=torch.int32, device=DEVICE),
            seq_lens=torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE),
            block_tables=tables,
            slot_mapping=torch.full((rows,), -1, device=DEVICE),
            max_query_tokens=1,
            max_seq_tokens=max(self.lengths),
            n_decode=rows,
        )


def extra_cells() -> list[Cell]:
    """What a uniform batch does not show."""
    generator = torch.Generator().manual_seed(0)
    ragged = torch.randint(100, 2049, (256,), generator=generator).tolist()
    return [
        Cell("256 x 100 … 2048", ragged),
        Cell("64 x 256, 1 x 16384", [256] * 64 + [16384]),
        Cell("64 x 2048, half shared", [2048] * 64, shared_tokens=1024),
        Cell("256 x 640", [640] * 256),
    ]


# -- timing ---------------------------------------------------------------------------------------


def graph_us(launches: list[Callable[[], object]], replays: int = 5) -> float:
    """Median microseconds of a launch, all of them in one graph."""
    for launch in launches[:2]:
        launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(launches))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes read and written a second by a copy of 4 GB, outside a graph: there it may be left to
    a copy engine."""
    source = torch.empty(2**31, dtype=DTYPE, device=DEVICE).normal_()
    target = torch.empty_like(source)
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return 2 * source.numel() * source.element_size() / min(times)


@dataclass(frozen=True)
class Work:
    """Layers of a cell, on as many pages as are needed to find none in the cache."""

    cell: Cell
    pool: Pool
    heads: Heads
    layers: list[tuple[Tensor, AttentionInputs]]

    @classmethod
    def of(cls, cell: Cell, pool: Pool, heads: Heads) -> Work:
        shape = (len(cell.lengths), heads.n_kv_heads * heads.group, heads.head_dim)
        q = torch.randn(shape, dtype=DTYPE, device=DEVICE)
        sets = min(MAX_SETS, max(1, math.ceil(COLD_BYTES / (cell.tokens * pool.token_bytes))))
        step = cell.tokens // pool.block_tokens
        layers = [(q, cell.inputs(pool, number * step)) for number in range(sets)]
        return cls(cell, pool, heads, layers)

    def us(self, config: DecodeConfig | None) -> float:
        """Of a layer, its work planned before."""
        launches = [self._launch(*layer, config) for layer in self.layers]
        us = graph_us(launches * math.ceil(LAUNCHES / len(launches)))
        for _, inputs in self.layers:
            inputs.plans.clear()
        return us

    def _launch(
        self, q: Tensor, inputs: AttentionInputs, config: DecodeConfig | None
    ) -> Callable[[], Tensor]:
        out, scale = torch.empty_like(q), self.heads.head_dim**-0.5
        plan_decode(inputs, self.heads, None, config or tuned(self.heads))
        caches = self.pool.k, self.pool.v
        return lambda: decode_attention(q, *caches, inputs, scale=scale, out=out, config=config)


def tuned(heads: Heads) -> DecodeConfig:
    return choose_config(heads, DTYPE, multiprocessors())


def plan_us(rows: int, context: int, heads: Heads, pool: Pool) -> float:
    inputs = Cell.uniform(rows, context).inputs(pool, 0)

    def plan() -> None:
        inputs.plans.clear()
        plan_decode(inputs, heads, None, tuned(heads))

    return graph_us([plan] * 20)


# -- correctness ----------------------------------------------------------------------------------


def check(pool: Pool, heads: Heads, config: DecodeConfig | None) -> None:
    lengths = [1, 192, 0, 700, 1023, 8192, 2048, 33, 31, 20000]
    inputs = Cell("check", lengths).inputs(pool, 0)
    n_heads = heads.n_kv_heads * heads.group
    q = torch.randn(len(lengths), n_heads, heads.head_dim, dtype=DTYPE, device=DEVICE)
    for window in (None, 1000):
        out = torch.full_like(q, torch.nan)
        decode_attention(
            q, pool.k, pool.v, inputs, scale=0.1, window=window, out=out, config=config
        )
        expected = exact(q, pool, inputs, lengths, scale=0.1, window=window)
        error = float((out.float() - expected).norm() / expected.norm())
        assert error < MAX_ERROR, (heads, config, window, error)


def exact(
    q: Tensor,
    pool: Pool,
    inputs: AttentionInputs,
    lengths: list[int],
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """In float32, a row at a time."""
    out = torch.zeros_like(q, dtype=torch.float32)
    for row, length in enumerate(lengths):
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


def print_cells(whole: Pool, copy_bytes_s: float) -> None:
    for heads, block_tokens in itertools.product(LAYERS, BLOCK_TOKENS):
        pool = whole.paged(block_tokens)
        check(pool, heads, None)
        print(f"\n{heads}, block_tokens {block_tokens}, {tuned(heads)}")
        print(f"planning 256 x 2048: {plan_us(256, 2048, heads, pool):.1f} µs")
        print("µs (% of copy)" + "".join(f"{context:>16}" for context in CONTEXTS))
        speeds: dict[tuple[int, int], float] = {}
        for batch in BATCHES:
            texts = []
            for context in CONTEXTS:
                us = Work.of(Cell.uniform(batch, context), pool, heads).us(None)
                speeds[batch, context] = batch * context * pool.token_bytes / us * 1e6
                part = speeds[batch, context] / copy_bytes_s
                low = "<" if batch * context >= MANY_TOKENS and part < 0.85 else " "
                texts.append(f"{us:>9.1f} ({part:3.0%}){low}")
            print(f"{batch:>14}" + "".join(texts), flush=True)
        print("more than 15% from a neighbour:", list(cliffs(speeds)) or "none")
        for cell in extra_cells():
            us = Work.of(cell, pool, heads).us(None)
            print(row_text(cell, us, pool, copy_bytes_s))


def row_text(cell: Cell, us: float, pool: Pool, copy_bytes_s: float) -> str:
    bytes_s = cell.tokens * pool.token_bytes / us * 1e6
    return f"{cell.name:>24} {us:>9.1f} µs {bytes_s / 1e9:>6.0f} GB/s {bytes_s / copy_bytes_s:4.0%}"


def cliffs(speeds: dict[tuple[int, int], float]) -> Iterator[str]:
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
    """Shapes of programs that fit a multiprocessor as often as they claim."""
    base = tuned(heads)
    found = []
    for tile, warps, stages, programs in itertools.product(
        [16, 32, 64, 128], [2, 4, 8], [2, 3, 4, 5], [1, 2, 3, 4, 5, 6]
    ):
        tile_bytes = 2 * tile * heads.head_dim * DTYPE.itemsize
        # Buffers of the pipeline, and the rearrangements at its end.
        program_bytes = (stages - 1) * tile_bytes + 8 * 1024
        fits = program_bytes * programs <= SHARED_BYTES
        in_flight = tile_bytes * (stages - 1) * programs
        balanced = tile // 16 >= warps // 2 and warps * programs <= 24
        if fits and balanced and in_flight >= 96 * 1024 and warps * programs >= 8:
            config = replace(base, tile_tokens=tile, num_warps=warps, num_stages=stages)
            found.append(replace(config, programs_per_sm=programs))
    return found


def variations(config: DecodeConfig) -> list[DecodeConfig]:
    return [
        replace(config, chunk_tokens=chunk_tokens)
        for chunk_tokens in (128, 256, 384, 512)
        if chunk_tokens % config.tile_tokens == 0
    ]


def compile_one(variant: tuple[Heads, int, DecodeConfig]) -> None:
    """By running it on a small pool."""
    heads, block_tokens, config = variant
    pool = Pool.random(heads, 16 * block_tokens).paged(block_tokens)
    Work.of(Cell.uniform(2, 64), pool, heads).us(config)


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
            cells = [(heads, n, tuned(heads)) for heads in LAYERS for n in BLOCK_TOKENS]
            shapes = [(heads, 16, config) for heads in LAYERS for config in candidates(heads)]
            compile_all(executor, [*cells, *(shapes if args.sweep else [])])
            return
        copy_bytes_s = copy_bandwidth()
        print(f"{torch.cuda.get_device_name()}: copy {copy_bytes_s / 1e9:.0f} GB/s")
        whole = Pool.random(LAYERS[0], POOL_TOKENS)
        if args.sweep:
            for heads in LAYERS:
                sweep(executor, whole, heads, args.best)
        else:
            print_cells(whole, copy_bytes_s)


if __name__ == "__main__":
    main()

"""Prefill attention over pages: TFLOP/s of the products that a causal mask leaves, bfloat16.

    python benchmarks/gpu/prefill_attention.py --compile-only
    python benchmarks/gpu/prefill_attention.py

First the kernel is held against its reference in float32, and the bits of a prompt computed in
chunks and in blocks of another size against the whole. Then every configuration runs on scattered
pages, launched many times in one CUDA graph over more buffers than the L2 cache holds, next to
torch's SDPA on contiguous keys and values. `--compile-only` fills Triton's cache from several
processes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing import get_context

import torch
from parts.agreement import relative_error
from parts.card_clock import launch_us
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pagemesh.kernels.attention import paged_attention
from pagemesh.kernels.gpu.prefill_attention import PrefillConfig, choose_config, prefill_attention
from pagemesh.kernels.inputs import AttentionInputs

DEVICE = "cuda"
DTYPE = torch.bfloat16
N_HEADS, N_KV_HEADS = 32, 8
GROUP = N_HEADS // N_KV_HEADS
BLOCK_TOKENS = [16, 64]
CHUNK_TOKENS = 2048
L2_BYTES = 60e6
LAUNCHES = 8
"""In a graph, at least."""
MAX_ERROR = 5e-3
"""||kernel - reference|| / ||reference||."""
COMPILERS = 14

CONFIGS = {
    64: [
        PrefillConfig(128, 64, 8, 2),
        PrefillConfig(128, 64, 8, 3),
        PrefillConfig(128, 64, 4, 2),
        PrefillConfig(128, 128, 8, 2),
        PrefillConfig(128, 128, 8, 3),
        PrefillConfig(64, 64, 4, 2),
        PrefillConfig(64, 64, 4, 3),
        PrefillConfig(64, 128, 4, 2),
    ],
    128: [
        PrefillConfig(128, 32, 8, 3),
        PrefillConfig(128, 64, 8, 2),
        PrefillConfig(128, 64, 8, 3),
        PrefillConfig(128, 64, 8, 5),
        PrefillConfig(128, 128, 8, 2),
        PrefillConfig(64, 64, 4, 2),
        PrefillConfig(64, 64, 4, 3),
        PrefillConfig(64, 128, 4, 2),
    ],
    256: [
        PrefillConfig(128, 32, 8, 2),
        PrefillConfig(128, 64, 8, 2),
        PrefillConfig(64, 32, 4, 2),
        PrefillConfig(64, 64, 4, 2),
    ],
}

Rows = list[tuple[int, int]]
"""(query tokens, context tokens) of each row of a step."""


def chunks(n_tokens: int, chunk_tokens: int) -> list[Rows]:
    bounds = [*range(0, n_tokens, chunk_tokens), n_tokens]
    return [[(stop - start, stop)] for start, stop in pairwise(bounds)]


# Each is a list of steps over the same pages.
CASES: dict[str, list[Rows]] = {
    "1k": [[(1024, 1024)]],
    "4k": [[(4096, 4096)]],
    "8k": [[(8192, 8192)]],
    "8k by 2k": chunks(8192, CHUNK_TOKENS),
    "64 x 128": [[(128, 128)] * 64],
}


@dataclass(frozen=True)
class Prompts:
    """q and out hold the tokens of all steps, one after the other."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    out: Tensor
    steps: list[AttentionInputs]

    def run(self, config: PrefillConfig | None = None) -> None:
        first = 0
        for inputs in self.steps:
            tokens = slice(first, first + inputs.slot_mapping.shape[0])
            prefill_attention(
                self.q[tokens],
                self.k_cache,
                self.v_cache,
                inputs,
                scale=self.q.shape[2] ** -0.5,
                out=self.out[tokens],
                config=config,
            )
            first = tokens.stop

    @property
    def n_bytes(self) -> int:
        return sum(x.nbytes for x in (self.q, self.k_cache, self.v_cache, self.out))


def prompts(steps: list[Rows], head_dim: int, block_tokens: int) -> Prompts:
    """Random, on scattered pages; the output is poisoned."""
    spans = [-(-context // block_tokens) for _, context in steps[-1]]
    blocks = torch.randperm(sum(spans), dtype=torch.int32) + 1
    tables = torch.zeros(len(spans), max(spans), dtype=torch.int32)
    for table, row_blocks in zip(tables, blocks.split(spans), strict=True):
        table[: len(row_blocks)] = row_blocks
    shape = (sum(spans) + 1, N_KV_HEADS, block_tokens, head_dim)
    k_cache, v_cache = (torch.randn(shape, dtype=DTYPE, device=DEVICE) for _ in range(2))
    n_tokens = sum(n for rows in steps for n, _ in rows)
    q = torch.randn(n_tokens, N_HEADS, head_dim, dtype=DTYPE, device=DEVICE)
    inputs = [step_inputs(rows, tables.to(DEVICE)) for rows in steps]
    return Prompts(q, k_cache, v_cache, torch.full_like(q, torch.nan), inputs)


def step_inputs(rows: Rows, tables: Tensor) -> AttentionInputs:
    starts = torch.tensor([0, *(n for n, _ in rows)]).cumsum(0)
    return AttentionInputs(
        query_start=starts.to(DEVICE, torch.int32),
        seq_lens=torch.tensor([c for _, c in rows], dtype=torch.int32, device=DEVICE),
        block_tables=tables,
        slot_mapping=torch.full((int(starts[-1]),), -1, device=DEVICE),
        max_query_tokens=max(n for n, _ in rows),
        max_seq_tokens=max(c for _, c in rows),
        n_decode=0,
    )


def teraflops(steps: list[Rows], head_dim: int) -> float:
    """Of both products, over the keys that each query sees."""
    pairs = sum(n * (c - n) + n * (n + 1) // 2 for rows in steps for n, c in rows)
    return 4 * pairs * N_HEADS * head_dim / 1e12


# -- correctness ----------------------------------------------------------------------------------


def check() -> None:
    rows = [(1, 1), (130, 130), (0, 0), (700, 3001), (1000, 1000), (5, 4096)]
    for head_dim in CONFIGS:
        for block_tokens in BLOCK_TOKENS:
            for window in (None, 1000):
                error = error_of(rows, head_dim, block_tokens, window)
                assert error < MAX_ERROR, (head_dim, block_tokens, window, error)
        check_bits(head_dim)
    print(f"as the reference (errors below {MAX_ERROR}), with the same bits in chunks")


def error_of(rows: Rows, head_dim: int, block_tokens: int, window: int | None) -> float:
    batch = prompts([rows], head_dim, block_tokens)
    caches = batch.k_cache, batch.v_cache
    options = {"scale": head_dim**-0.5, "window": window}
    prefill_attention(batch.q, *caches, batch.steps[0], **options, out=batch.out)
    exact = (x.float() for x in (batch.q, *caches))
    return relative_error(batch.out, paged_attention(*exact, batch.steps[0], **options))


def check_bits(head_dim: int) -> None:
    chunked = prompts(chunks(4000, 333), head_dim, BLOCK_TOKENS[0])
    chunked.run()
    for rows in (1024, 1):
        config = choose_config(DTYPE, head_dim, rows)
        out = torch.full_like(chunked.out, torch.nan)
        whole = step_inputs([(4000, 4000)], chunked.steps[0].block_tables)
        Prompts(chunked.q, chunked.k_cache, chunked.v_cache, out, [whole]).run(config)
        assert torch.equal(out, chunked.out), config


# -- speed ----------------------------------------------------------------------------------------


def turns_s(runs: list[Callable[[], object]]) -> float:
    """One run's time, from a graph of all of them in turn."""
    n_runs = max(LAUNCHES, len(runs))
    return launch_us([runs[i % len(runs)] for i in range(n_runs)]) / 1e6


def kernel_rates(head_dim: int, block_tokens: int) -> Iterator[tuple[PrefillConfig, list[float]]]:
    """TFLOP/s of each configuration in each case."""
    batches = []
    for steps in CASES.values():
        one = prompts(steps, head_dim, block_tokens)
        others = range(int(L2_BYTES // one.n_bytes))
        batches.append([one, *(prompts(steps, head_dim, block_tokens) for _ in others)])
    for config in CONFIGS[head_dim]:
        times = [turns_s([partial(b.run, config) for b in batch]) for batch in batches]
        yield config, rates(head_dim, times)


def rates(head_dim: int, times_s: list[float]) -> list[float]:
    """TFLOP/s in each case."""
    work = (teraflops(steps, head_dim) for steps in CASES.values())
    return [done / time_s for done, time_s in zip(work, times_s, strict=True)]


def sdpa_s(steps: list[Rows], head_dim: int, backend: SDPBackend) -> float:
    """Contiguous; NaN where the backend does not take it, and for chunks, since torch's causal mask
    begins at the first key."""
    if len(steps) > 1:
        return math.nan
    n_rows, (n_tokens, _) = len(steps[0]), steps[0][0]
    q, k, v = (
        torch.randn(n_rows, heads, n_tokens, head_dim, dtype=DTYPE, device=DEVICE)
        for heads in (N_HEADS, N_KV_HEADS, N_KV_HEADS)
    )
    sdpa = partial(scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
    with sdpa_kernel(backend), suppress(RuntimeError):
        return turns_s([sdpa])
    return math.nan


def line(head_dim: int, block_tokens: int | None, what: str, teraflops_s: list[float]) -> str:
    cells = "".join(f"{rate:10.0f}" for rate in teraflops_s)
    return f"{head_dim:8} {block_tokens or '':>5} {what:24}{cells}"


def sweep() -> None:
    cells = "".join(f"{name:>10}" for name in CASES)
    print(f"head dim  page {'rows, tile, warps, stages':24}{cells}   TFLOP/s")
    for head_dim in CONFIGS:
        for block_tokens in BLOCK_TOKENS:
            for c, reached in kernel_rates(head_dim, block_tokens):
                what = f"{c.block_rows}, {c.tile_tokens}, {c.num_warps}, {c.num_stages}"
                print(line(head_dim, block_tokens, what, reached), flush=True)
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            times = [sdpa_s(steps, head_dim, backend) for steps in CASES.values()]
            print(line(head_dim, None, backend.name.lower(), rates(head_dim, times)), flush=True)


# -- compiling ------------------------------------------------------------------------------------


def compile_variant(
    head_dim: int, block_tokens: int, config: PrefillConfig, window: int | None
) -> None:
    batch = prompts([[(1, 1)]], head_dim, block_tokens)
    scale = head_dim**-0.5
    prefill_attention(
        batch.q,
        batch.k_cache,
        batch.v_cache,
        batch.steps[0],
        scale=scale,
        window=window,
        out=batch.out,
        config=config,
    )
    torch.cuda.synchronize()


def compile_all() -> None:
    chosen = {
        head_dim: {choose_config(DTYPE, head_dim, rows) for rows in (1, 1024)}
        for head_dim in CONFIGS
    }
    variants = [
        (head_dim, block_tokens, config, window)
        for head_dim in CONFIGS
        for block_tokens in BLOCK_TOKENS
        for window in (None, 1000)
        for config in chosen[head_dim] | (set() if window else set(CONFIGS[head_dim]))
    ]
    with ProcessPoolExecutor(COMPILERS, get_context("spawn")) as pool:
        list(pool.map(compile_variant, *zip(*variants, strict=True)))
    print(f"compiled {len(variants)} variants")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--compile-only", action="store_true", help="fill Triton's cache")
    if parser.parse_args().compile_only:
        compile_all()
        return
    torch.manual_seed(0)
    check()
    sweep()


if __name__ == "__main__":
    main()

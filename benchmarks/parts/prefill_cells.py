"""Prompts to attend to: steps of rows over scattered pages, and how much work they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from pagemesh.kernels.inputs import AttentionInputs

DEVICE = "cuda"
DTYPE = torch.bfloat16

Rows = list[tuple[int, int]]
"""(query tokens, context tokens) of each row of a step."""
Attention = Callable[..., None]
"""With the arguments of `prefill_attention`, the configuration in place."""


@dataclass(frozen=True)
class Layer:
    n_heads: int
    n_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.n_heads}/{self.n_kv_heads} of {self.head_dim}"


def chunks(n_tokens: int, chunk_tokens: int) -> list[Rows]:
    bounds = [*range(0, n_tokens, chunk_tokens), n_tokens]
    return [[(stop - start, stop)] for start, stop in pairwise(bounds)]


# Each is a list of steps over the same pages.
CASES: dict[str, list[Rows]] = {
    "128": [[(128, 128)]],
    "512": [[(512, 512)]],
    "1k": [[(1024, 1024)]],
    "2k": [[(2048, 2048)]],
    "4k": [[(4096, 4096)]],
    "8k": [[(8192, 8192)]],
    "8k by 2k": chunks(8192, 2048),
    "64 x 128": [[(128, 128)] * 64],
    "16 x 512+2k": [[(512, 2560)] * 16],
}


@dataclass(frozen=True)
class Prompts:
    """q and out hold the tokens of all steps, one after the other."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    out: Tensor
    steps: list[AttentionInputs]

    def run(self, attention: Attention, window: int | None = None) -> None:
        first = 0
        for inputs in self.steps:
            tokens = slice(first, first + inputs.slot_mapping.shape[0])
            attention(
                self.q[tokens],
                self.k_cache,
                self.v_cache,
                inputs,
                scale=self.q.shape[2] ** -0.5,
                window=window,
                out=self.out[tokens],
            )
            first = tokens.stop

    @property
    def n_bytes(self) -> int:
        return sum(x.nbytes for x in (self.q, self.k_cache, self.v_cache, self.out))


def prompts(steps: list[Rows], layer: Layer, block_tokens: int) -> Prompts:
    """Random, on scattered pages; the output is poisoned, and so is what lies behind the last token
    of a row, which is another's."""
    spans = [-(-context // block_tokens) for _, context in steps[-1]]
    blocks = torch.randperm(sum(spans), dtype=torch.int32) + 1
    tables = torch.zeros(len(spans), max(spans), dtype=torch.int32)
    for table, row_blocks in zip(tables, blocks.split(spans), strict=True):
        table[: len(row_blocks)] = row_blocks
    shape = (sum(spans) + 1, layer.n_kv_heads, block_tokens, layer.head_dim)
    k_cache, v_cache = (torch.randn(shape, dtype=DTYPE, device=DEVICE) for _ in range(2))
    for table, (_, context), span in zip(tables, steps[-1], spans, strict=True):
        if context % block_tokens:
            for cache in (k_cache, v_cache):
                cache[table[span - 1], :, context % block_tokens :] = torch.nan
    n_tokens = sum(n for rows in steps for n, _ in rows)
    q = torch.randn(n_tokens, layer.n_heads, layer.head_dim, dtype=DTYPE, device=DEVICE)
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


def teraflops(steps: list[Rows], layer: Layer) -> float:
    """Of both products, over the keys that each query sees."""
    pairs = sum(n * (c - n) + n * (n + 1) // 2 for rows in steps for n, c in rows)
    return 4 * pairs * layer.n_heads * layer.head_dim / 1e12

"""Decode attention on scattered pages: batches, and the launches that time them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from pagemesh.kernels.gpu.decode_attention import choose_config, decode_attention
from pagemesh.kernels.gpu.decode_plan import DecodeConfig, Heads, plan_decode
from pagemesh.kernels.gpu.launch import multiprocessors
from pagemesh.kernels.inputs import AttentionInputs
from parts.card_clock import launch_us

DEVICE: Final = "cuda"
DTYPE: Final = torch.bfloat16
_COLD_BYTES: Final = 400e6
"""A graph reads at least this much (several times the L2 cache) before it returns to a page."""
_MAX_SETS: Final = 128
_LAUNCHES: Final = 8
"""At least, in a graph."""
_PLANS: Final = 20


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

    @classmethod
    def prefixed(cls, batch: int, shared: int, own: int) -> Cell:
        return cls(f"{batch} x ({shared} + {own})", [shared + own] * batch, shared)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def distinct_tokens(self) -> int:
        return self.tokens - self.shared_tokens * (len(self.lengths) - 1)

    def inputs(self, pool: Pool, offset: int) -> AttentionInputs:
        """Rows on the pool's blocks from `offset` on, in its shuffled order."""
        rows = len(self.lengths)
        return AttentionInputs(
            query_start=torch.arange(rows + 1, dtype=torch.int32, device=DEVICE),
            seq_lens=torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE),
            block_tables=self._tables(pool, offset),
            slot_mapping=torch.full((rows,), -1, device=DEVICE),
            max_query_tokens=1,
            max_seq_tokens=max(self.lengths),
            n_decode=rows,
        )

    def _tables(self, pool: Pool, offset: int) -> Tensor:
        rows, spans = len(self.lengths), -(-max(self.lengths) // pool.block_tokens)
        wanted = torch.arange(offset, offset + rows * spans, device=DEVICE) % len(pool.order)
        tables = pool.order[wanted].view(rows, spans)
        shared = self.shared_tokens // pool.block_tokens
        tables[:, :shared] = tables[:1, :shared]
        return tables


def extra_cells() -> list[Cell]:
    """What a uniform batch does not show."""
    generator = torch.Generator().manual_seed(0)
    ragged = torch.randint(100, 2049, (256,), generator=generator).tolist()
    return [
        Cell("256 x 100 … 2048", ragged),
        Cell("64 x 256, 1 x 16384", [256] * 64 + [16384]),
        Cell("256 x 640", [640] * 256),
    ]


def shared_cells() -> list[Cell]:
    """Batches with a common prefix."""
    cuts = [(64, 1024, 1024), (200, 2048, 128), (32, 4096, 64), (8, 8192, 64)]
    return [Cell.prefixed(*cut) for cut in cuts]


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
        read_bytes = cell.distinct_tokens * pool.token_bytes
        sets = min(_MAX_SETS, max(1, math.ceil(_COLD_BYTES / read_bytes)))
        step = cell.tokens // pool.block_tokens
        layers = [(q, cell.inputs(pool, number * step)) for number in range(sets)]
        return cls(cell, pool, heads, layers)

    def us(self, config: DecodeConfig | None) -> float:
        """Of a layer, its work planned before."""
        launches = [self._launch(*layer, config) for layer in self.layers]
        us = launch_us(launches * math.ceil(_LAUNCHES / len(launches)))
        for _, inputs in self.layers:
            inputs.plans.clear()
        return us

    def _launch(
        self, q: Tensor, inputs: AttentionInputs, config: DecodeConfig | None
    ) -> Callable[[], Tensor]:
        out, scale = torch.empty_like(q), self.heads.head_dim**-0.5
        block_tokens = self.pool.block_tokens
        plan_decode(inputs, self.heads, block_tokens, None, config or tuned(self.heads))
        caches = self.pool.k, self.pool.v
        return lambda: decode_attention(q, *caches, inputs, scale=scale, out=out, config=config)


def tuned(heads: Heads) -> DecodeConfig:
    return choose_config(heads, DTYPE, multiprocessors())


def alone(config: DecodeConfig) -> DecodeConfig:
    """Each row is computed by itself."""
    return replace(config, share=False)


def plan_us(cell: Cell, heads: Heads, pool: Pool, config: DecodeConfig) -> float:
    inputs = cell.inputs(pool, 0)

    def plan() -> None:
        inputs.plans.clear()
        plan_decode(inputs, heads, pool.block_tokens, None, config)

    return launch_us([plan] * _PLANS)

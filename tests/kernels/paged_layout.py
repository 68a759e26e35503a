"""Random paged batches and the dense attention they must agree with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagemesh.kernels.attention import store_kv
from pagemesh.kernels.inputs import AttentionInputs


@dataclass(frozen=True)
class Shape:
    n_kv_heads: int
    group: int
    head_dim: int
    block_tokens: int

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass(frozen=True)
class Batch:
    """`keys[r]`, `values[r]`: [context, Hkv, D], the whole context of row r, in order."""

    shape: Shape
    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    k_cache: Tensor
    v_cache: Tensor
    inputs: AttentionInputs


def random_batch(
    shape: Shape,
    rows: list[tuple[int, int]],
    *,
    n_decode: int,
    seed: int,
    padding_tokens: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Batch:
    """`rows`: (query tokens, context tokens). Pages are scattered over a pool of NaN, and unused
    columns of the block tables point at a page of NaN too. The numbers do not depend on the size
    of pages."""
    rng, pages = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
    spans = [-(-context // shape.block_tokens) for _, context in rows]
    width = max([1, *spans]) + 2
    num_blocks = sum(spans) + 3
    free = (torch.randperm(num_blocks - 1, generator=pages) + 1).tolist()
    stray = free.pop()
    pool_shape = (num_blocks, shape.n_kv_heads, shape.block_tokens, shape.head_dim)
    k_cache, v_cache = (torch.full(pool_shape, torch.nan, dtype=dtype) for _ in range(2))
    k_cache[0], v_cache[0] = 0, 0
    tables = torch.full((len(rows), width), stray, dtype=torch.int32)
    keys, values = [], []
    for row, (_, context) in enumerate(rows):
        table = [free.pop() for _ in range(spans[row])]
        tables[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
        k, v = (
            torch.randn(context, shape.n_kv_heads, shape.head_dim, generator=rng).to(dtype)
            for _ in range(2)
        )
        store_kv(k, v, k_cache, v_cache, _slots(table, context, shape.block_tokens))
        keys.append(k)
        values.append(v)
    starts = torch.tensor([0, *(n for n, _ in rows)]).cumsum(0)
    tokens = int(starts[-1]) + padding_tokens
    q = torch.randn(tokens, shape.n_kv_heads * shape.group, shape.head_dim, generator=rng)
    inputs = AttentionInputs(
        query_start=starts.to(torch.int32),
        seq_lens=torch.tensor([context for _, context in rows], dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.full((tokens,), -1),
        max_query_tokens=max((n for n, _ in rows), default=0),
        max_seq_tokens=max((context for _, context in rows), default=0),
        n_decode=n_decode,
    )
    return Batch(shape, q.to(dtype), keys, values, k_cache, v_cache, inputs)


def counted(batch: Batch, n_more: int = 3) -> Batch:
    """As a graph gets it: with room for rows that there are not, the first of which has the padding
    tokens, and the number of rows on the device alone."""
    inputs, n_tokens, n_rows = batch.inputs, len(batch.q), len(batch.inputs.seq_lens)
    width = batch.inputs.block_tables.shape[1]
    ends = torch.full((n_more,), n_tokens, dtype=torch.int32)
    nothing = torch.zeros(n_more, width, dtype=torch.int32)
    more = replace(
        inputs,
        query_start=torch.cat((inputs.query_start, ends)),
        seq_lens=torch.cat((inputs.seq_lens, nothing[:, 0])),
        block_tables=torch.cat((inputs.block_tables, nothing)),
        max_query_tokens=n_tokens,
        n_decode=min(n_tokens, n_rows + n_more - 1),
        counts=torch.tensor([n_rows + 1, inputs.n_decode], dtype=torch.int32),
    )
    return replace(batch, inputs=more)


def _slots(table: list[int], context: int, block_tokens: int) -> Tensor:
    return torch.tensor(
        [table[p // block_tokens] * block_tokens + p % block_tokens for p in range(context)],
        dtype=torch.int64,
    )


def dense_attention(batch: Batch, window: int | None) -> Tensor:
    """The definition, one query at a time in float64; zeros where there is nothing to see."""
    out = torch.zeros_like(batch.q, dtype=torch.float64)
    starts = batch.inputs.query_start.tolist()
    for row, context in enumerate(batch.inputs.seq_lens.tolist()):
        for token in range(starts[row], starts[row + 1]):
            last = context - starts[row + 1] + token
            first = 0 if window is None else max(0, last - window + 1)
            if context:
                seen = slice(first, last + 1)
                out[token] = _one_query(
                    batch.q[token].double(),
                    batch.keys[row][seen].double(),
                    batch.values[row][seen].double(),
                    batch.shape,
                )
    return out


def _one_query(q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> Tensor:
    k, v = (x.repeat_interleave(shape.group, dim=1) for x in (k, v))
    weights = (torch.einsum("hd,shd->hs", q, k) * shape.scale).softmax(-1)
    return torch.einsum("hs,shd->hd", weights, v)

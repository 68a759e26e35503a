"""What the torch attention reference works out once per step: where to read, and what to mask.

All layers with the same window share a plan. The host reads lengths and bounds here, nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from pagemesh.kernels.inputs import AttentionInputs

# Elements of K read at once for decode rows: 4 MiB in float32, so that they are still in the CPU's
# cache when they are used.
_GATHER_ELEMENTS: Final = 2**20


@dataclass(frozen=True, slots=True)
class Pages:
    """How the pool of pages is laid out: [num_blocks, n_kv_heads, block_tokens, head_dim]."""

    n_kv_heads: int
    block_tokens: int
    head_dim: int

    @classmethod
    def of(cls, cache: Tensor) -> Pages:
        return cls(*cache.shape[1:])

    def indices(self, blocks: Tensor) -> Tensor:
        """int64[n * Hkv * m]: rows of the pool, seen as [num_blocks * Hkv, block_tokens * D], that
        hold blocks [n, m], head by head."""
        heads = torch.arange(self.n_kv_heads, device=blocks.device)[:, None]
        return (blocks[:, None, :] * self.n_kv_heads + heads).flatten()


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows of like length, computed together over L gathered positions."""

    rows: Tensor
    """int64[n]: rows of the batch, which are also their tokens."""
    pages: Tensor
    """int64[n * Hkv * m]: see Pages.indices; L = m * block_tokens."""
    seen: Tensor
    """bool[n, 1, 1, L]: the positions each row attends to. None for a padding row: torch's softmax
    over nothing is zero."""
    stale: Tensor
    """int64[…]: of the n * Hkv * L gathered positions, those past a row's end but in its last page.
    They may hold another request's NaN."""


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One sequence's chunk of query tokens."""

    tokens: slice
    pages: Tensor
    """int64[Hkv * m]: see Pages.indices."""
    n_keys: int
    """The gathered positions that exist."""
    seen: Tensor | None
    """bool[n, n_keys], or None for a plain causal square."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    decodes: list[DecodeGroup]
    prefills: list[PrefillRow]


def plan_attention(inputs: AttentionInputs, pages: Pages, window: int | None) -> AttentionPlan:
    """The plan of one step for layers of this window."""
    lens = inputs.seq_lens.tolist()
    n_decode = inputs.n_decode if inputs.counts is None else int(inputs.counts[1])
    bounds = inputs.query_start.tolist()
    tokens = [slice(start, stop) for start, stop in pairwise(bounds)]
    prefills = [
        _prefill_row(inputs.block_tables[row], tokens[row], lens[row], pages, window)
        for row in range(n_decode, len(lens))
        if lens[row] > 0 and tokens[row].start < tokens[row].stop
    ]
    return AttentionPlan(list(_decode_groups(inputs, lens[:n_decode], pages, window)), prefills)


# -- decode rows ----------------------------------------------------------------------------------


def _decode_groups(
    inputs: AttentionInputs, lens: list[int], pages: Pages, window: int | None
) -> Iterator[DecodeGroup]:
    page_elements = pages.n_kv_heads * pages.block_tokens * pages.head_dim
    spans = [_span_blocks(length, pages.block_tokens, window) for length in lens]
    for group in groups_of_like_span(spans, _GATHER_ELEMENTS // page_elements):
        rows = torch.tensor(group, device=inputs.seq_lens.device)
        yield _decode_group(
            rows, inputs.seq_lens[rows], inputs.block_tables[rows], spans[group[0]], pages, window
        )


def _span_blocks(length: int, block_tokens: int, window: int | None) -> int:
    """How many blocks a decode row may have to read (at least one)."""
    blocks = max(1, -(-length // block_tokens))
    return blocks if window is None else min(blocks, -(-window // block_tokens) + 1)


def groups_of_like_span(spans: list[int], max_blocks: int) -> Iterator[list[int]]:
    """Rows in groups, longest first, padded to the longest of their group.

    A group reads at most `max_blocks` (or is one row), and no row is padded to more than about
    twice its span.
    """
    order = sorted(range(len(spans)), key=spans.__getitem__, reverse=True)
    while order:
        longest = spans[order[0]]
        size = max(1, min(len(order), max_blocks // longest))
        while spans[order[size - 1]] * 2 < longest - 1:
            size -= 1
        yield order[:size]
        order = order[size:]


def _decode_group(
    rows: Tensor, lens: Tensor, tables: Tensor, n_blocks: int, pages: Pages, window: int | None
) -> DecodeGroup:
    lens = lens[:, None]
    first = torch.zeros_like(lens) if window is None else (lens - window).clamp_min(0)
    first = first // pages.block_tokens
    columns = first + torch.arange(n_blocks, device=rows.device)
    exists = columns * pages.block_tokens < lens
    blocks = tables.gather(1, columns.clamp_max(tables.shape[1] - 1)).where(exists, 0)
    offsets = torch.arange(n_blocks * pages.block_tokens, device=rows.device)
    positions = first * pages.block_tokens + offsets
    seen = positions < lens
    if window is not None:
        seen &= positions >= lens - window
    stale = (positions >= lens) & exists.repeat_interleave(pages.block_tokens, dim=1)
    stale = stale[:, None].expand(-1, pages.n_kv_heads, -1).flatten().nonzero()[:, 0]
    return DecodeGroup(rows, pages.indices(blocks), seen[:, None, None], stale)


# -- prefill rows ---------------------------------------------------------------------------------


def _prefill_row(
    table: Tensor, tokens: slice, length: int, pages: Pages, window: int | None
) -> PrefillRow:
    """The last tokens of a sequence of `length` tokens."""
    n = tokens.stop - tokens.start
    first_block = 0 if window is None else max(0, length - n - window + 1) // pages.block_tokens
    first = first_block * pages.block_tokens
    blocks = table[first_block : -(-length // pages.block_tokens)]
    square = n == length and (window is None or window >= length)
    seen = None if square else _causal_mask(n, first, length, window, table.device)
    return PrefillRow(tokens, pages.indices(blocks[None]), length - first, seen)


def _causal_mask(
    n: int, first: int, length: int, window: int | None, device: torch.device
) -> Tensor:
    """bool[n, length - first]: which keys (positions first …) the last n positions see."""
    queries = torch.arange(length - n, length, device=device)[:, None]
    keys = torch.arange(first, length, device=device)
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)

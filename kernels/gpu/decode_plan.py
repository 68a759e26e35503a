"""Which program of the decode attention reads what: a work list made on the device, once a step.

A row's tokens are cut into chunks, so that a lone long row fills the card and a batch of unequal
rows leaves no multiprocessor idle at the end. Where a row is cut follows from its own length and
the configuration alone: its bits do not depend on its neighbours. Rows that have the same pages in
a chunk are computed together (decode_share.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from pagemesh.kernels.gpu.decode_chunk import ITEM_FIELDS
from pagemesh.kernels.gpu.decode_share import ROWS, group_kernel, match_kernel
from pagemesh.kernels.gpu.launch import cdiv, multiprocessors, next_power_of_2, pdl
from pagemesh.kernels.inputs import AttentionInputs

# 32-bit registers of a multiprocessor, of every card since Kepler.
_REGISTERS: Final = 65536
QUERY_HEADS: Final = 16
"""The fewest rows of a matrix product on tensor cores."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How the work is cut and run; the same for all rows."""

    tile_tokens: int = 64
    """K and V are read this many tokens at a time."""
    chunk_tokens: int = 256
    """A row of more than 1.5 times as many tokens is cut at multiples of it."""
    max_chunks: int = 32
    """No row is cut into more chunks: longer rows have chunks of 2, 4, 8 … times as many tokens."""
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 3
    share: bool = True
    """Whether rows with the same pages are computed together: as many as the rows of a matrix
    product hold, which those of one row do not fill."""

    def chunks(self, tokens: int) -> int:
        """The most chunks that a row of up to `tokens` tokens is cut into."""
        if 2 * tokens <= 3 * self.chunk_tokens:
            return 1
        return min(self.max_chunks, cdiv(tokens, self.chunk_tokens))

    def max_members(self, group: int) -> int:
        """The most rows that are computed together."""
        return max(1, QUERY_HEADS // next_power_of_2(group)) if self.share else 1

    @property
    def programs(self) -> int:
        return multiprocessors() * self.programs_per_sm

    @property
    def max_registers(self) -> int:
        """Of a thread, so that all programs are resident at once."""
        per_thread = _REGISTERS // (32 * self.num_warps * self.programs_per_sm)
        return min(255, per_thread // 8 * 8)


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of an attention layer."""

    n_kv_heads: int
    group: int
    """Query heads that share a KV head."""
    head_dim: int


class WorkList(NamedTuple):
    """Items for programs to take. There is room for what they read ahead."""

    items: Tensor
    """int32[…, 3 + members]: first token, token after the last, the chunk's number in the row
    (65535 if it has no other) with the number of rows above it (<< 16), and these rows."""
    n_items: Tensor
    """int32[1]."""
    members: int
    """The most rows of an item."""

    @classmethod
    def empty(cls, room: int, members: int, device: torch.device) -> WorkList:
        shape = room, ITEM_FIELDS.value + members
        items = torch.empty(shape, dtype=torch.int32, device=device)
        return cls(items, torch.empty(1, dtype=torch.int32, device=device), members)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The work of one step's decode rows, and the scratch memory of its layers.

    A row's bound of chunks is `config.chunks(max_seq_tokens)`, or of the window if that is less.
    The largest part of the memory is the partial sums: 4 * rows * max_chunks * query heads *
    (head_dim + 2) bytes.
    """

    singles: WorkList
    """Chunks of one row. Item r is the last chunk of row r; the others follow in about this order:
    the first chunks of 16 rows, then their second …"""
    shared: WorkList
    """Chunks that several rows have in common; without any where `members` is 1."""
    n_chunks: Tensor
    """int32[rows]."""
    leaders: Tensor
    """int32[max_chunks - 1, rows]: the first row with the same pages in a chunk, maybe itself."""
    arrived: Tensor
    """int32[rows, Hkv]: chunks whose partial sums are written; zero between layers."""
    sums: Tensor
    """float32[rows, Hkv, max_chunks, group, head_dim]: values weighted by exp2(score - peak)."""
    peaks: Tensor
    """float32[2, rows, Hkv, max_chunks, group]: highest score (log2), sum of weights."""
    max_chunks: int
    """Of a row of this batch: a bound that the host knows."""

    @classmethod
    def empty(
        cls,
        rows: int,
        max_chunks: int,
        max_members: int,
        heads: Heads,
        programs: int,
        device: torch.device,
    ) -> DecodePlan:
        def ints(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        slots = (rows, heads.n_kv_heads, max_chunks, heads.group)
        ahead = cdiv(programs, heads.n_kv_heads)
        n_pairs = rows * (max_chunks - 1) // 2 if max_members > 1 else 0
        return cls(
            singles=WorkList.empty(rows * max_chunks + ahead, 1, device),
            shared=WorkList.empty(n_pairs + ahead, max_members, device),
            n_chunks=ints(rows),
            leaders=ints(max_chunks - 1, rows),
            arrived=ints(rows, heads.n_kv_heads),
            sums=torch.empty(*slots, heads.head_dim, dtype=torch.float32, device=device),
            peaks=torch.empty(2, *slots, dtype=torch.float32, device=device),
            max_chunks=max_chunks,
        )


def plan_decode(
    inputs: AttentionInputs,
    heads: Heads,
    block_tokens: int,
    window: int | None,
    config: DecodeConfig,
) -> DecodePlan:
    """The plan for the first n_decode rows; made by the first layer that asks, kept for others."""
    key = (DecodePlan, heads, block_tokens, window, config)
    if key not in inputs.plans:
        inputs.plans[key] = _new_plan(inputs, heads, block_tokens, window, config)
    plan: DecodePlan = inputs.plans[key]
    return plan


def _new_plan(
    inputs: AttentionInputs,
    heads: Heads,
    block_tokens: int,
    window: int | None,
    config: DecodeConfig,
) -> DecodePlan:
    rows, most = inputs.n_decode, inputs.max_seq_tokens
    max_chunks = config.chunks(most if window is None else min(most, window))
    # Windows begin where they like, and so do their chunks.
    max_members = 1 if window or max_chunks == 1 else config.max_members(heads.group)
    device = inputs.seq_lens.device
    plan = DecodePlan.empty(rows, max_chunks, max_members, heads, config.programs, device)
    blocks = cdiv(rows, ROWS.value)
    columns = max(1, min(max_chunks - 1, multiprocessors() // blocks))
    cut = rows, inputs.counts, window or 0, config.chunk_tokens, config.max_chunks
    counted = inputs.counts is not None
    match_kernel[(blocks, columns)](
        inputs.seq_lens,
        inputs.block_tables,
        plan.singles.items,
        plan.singles.n_items,
        plan.shared.n_items,
        plan.n_chunks,
        plan.leaders,
        plan.arrived,
        inputs.block_tables.stride(0),
        *cut,
        N_KV_HEADS=heads.n_kv_heads,
        HEADS=next_power_of_2(heads.n_kv_heads),
        PAGE_BITS=block_tokens.bit_length() - 1,
        MEMBERS=max_members,
        COUNTED=counted,
        PDL=pdl(),
        launch_pdl=pdl(),
    )
    if max_chunks > 1:
        group_kernel[(blocks, columns)](
            inputs.seq_lens,
            *plan.singles[:2],
            *plan.shared[:2],
            plan.n_chunks,
            plan.leaders,
            cdiv(config.programs, heads.n_kv_heads),
            *cut,
            MEMBERS=max_members,
            COUNTED=counted,
            PDL=pdl(),
            launch_pdl=pdl(),
        )
    return plan

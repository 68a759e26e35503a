"""Which program of the decode attention reads what: a work list made on the device, once a step.

A row's tokens are cut into chunks, so that a lone long row fills the card and a batch of unequal
rows leaves no multiprocessor idle at the end. Where a row is cut follows from its own length and
the configuration alone: its bits do not depend on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagemesh.kernels.gpu.kernel import kernel
from pagemesh.kernels.gpu.launch import cdiv, multiprocessors, next_power_of_2, pdl
from pagemesh.kernels.inputs import AttentionInputs

_ITEM_FIELDS: Final = 4
# Rows that take turns, chunk by chunk.
_ROWS: Final = 16
# 32-bit registers of a multiprocessor, of every card since Kepler.
_REGISTERS: Final = 65536


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How the work is cut and run; the same for all rows."""

    tile_tokens: int = 64
    """K and V are read this many tokens at a time."""
    chunk_tokens: int = 256
    """A row of at least 1.5 times as many tokens is cut into chunks of about this size."""
    max_chunks: int = 32
    """No row is cut into more chunks: longer rows have longer chunks."""
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 3

    def chunks(self, tokens: int) -> int:
        """The most chunks that a row of up to `tokens` tokens is cut into."""
        return max(1, min(self.max_chunks, (tokens + self.chunk_tokens // 2) // self.chunk_tokens))

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


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The work list of one step's decode rows, and the scratch memory of its layers.

    A row's bound of chunks is `config.chunks(max_seq_tokens)`, or of the window if that is less.
    The largest part of the memory is the partial sums: 4 * rows * max_chunks * query heads *
    (head_dim + 2) bytes.
    """

    items: Tensor
    """int32[rows * max_chunks + room to read ahead, 4]: row, first token, token after the last, and
    the chunk's number in the row with the row's number of chunks above it (<< 16). The first chunks
    of 16 rows come first, then their second …: rows with a common prefix share it in the L2 cache,
    and a row's partial sums are still there when its last chunk is done."""
    n_items: Tensor
    """int32[1]: their number."""
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
        cls, rows: int, max_chunks: int, heads: Heads, programs: int, device: torch.device
    ) -> DecodePlan:
        slots = (rows, heads.n_kv_heads, max_chunks, heads.group)
        read_ahead = cdiv(programs, heads.n_kv_heads)
        room = rows * max_chunks + read_ahead
        return cls(
            items=torch.empty(room, _ITEM_FIELDS, dtype=torch.int32, device=device),
            n_items=torch.empty(1, dtype=torch.int32, device=device),
            arrived=torch.empty(rows, heads.n_kv_heads, dtype=torch.int32, device=device),
            sums=torch.empty(*slots, heads.head_dim, dtype=torch.float32, device=device),
            peaks=torch.empty(2, *slots, dtype=torch.float32, device=device),
            max_chunks=max_chunks,
        )


def plan_decode(
    inputs: AttentionInputs, heads: Heads, window: int | None, config: DecodeConfig
) -> DecodePlan:
    """The plan for the first n_decode rows; made by the first layer that asks, kept for others."""
    key = (DecodePlan, heads, window, config)
    if key not in inputs.plans:
        inputs.plans[key] = _new_plan(inputs, heads, window, config)
    plan: DecodePlan = inputs.plans[key]
    return plan


def _new_plan(
    inputs: AttentionInputs, heads: Heads, window: int | None, config: DecodeConfig
) -> DecodePlan:
    rows, most = inputs.n_decode, inputs.max_seq_tokens
    max_chunks = config.chunks(most if window is None else min(most, window))
    plan = DecodePlan.empty(rows, max_chunks, heads, config.programs, inputs.seq_lens.device)
    _plan_kernel[(cdiv(rows, _ROWS),)](
        inputs.seq_lens,
        plan.items,
        plan.n_items,
        plan.arrived,
        rows,
        window or 0,
        config.tile_tokens,
        config.chunk_tokens,
        config.max_chunks,
        N_KV_HEADS=heads.n_kv_heads,
        HEADS=next_power_of_2(heads.n_kv_heads),
        COLUMNS=next_power_of_2(config.max_chunks),
        ROWS=_ROWS,
        PDL=pdl(),
        launch_pdl=pdl(),
    )
    return plan


@triton.jit
def _cut(seq_lens, rows, n_rows, window, tile, chunk_tokens, max_chunks):
    """Of each row: its first token seen, its length, a chunk's tokens, and how many chunks."""
    lens = tl.load(seq_lens + rows, mask=rows < n_rows, other=0)
    first = tl.where(window > 0, tl.maximum(lens - window, 0), 0)
    seen = lens - first
    wanted = tl.minimum(tl.maximum((seen + chunk_tokens // 2) // chunk_tokens, 1), max_chunks)
    chunk = tl.cdiv(tl.maximum(tl.cdiv(seen, wanted), 1), tile) * tile
    n_chunks = tl.maximum(tl.cdiv(seen, chunk), 1)
    return first, lens, chunk, tl.where(rows < n_rows, n_chunks, 0)


@kernel(do_not_specialize=["n_rows", "window", "tile", "chunk_tokens", "max_chunks"])
def _plan_kernel(
    seq_lens,
    items,
    n_items,
    arrived,
    n_rows,
    window,
    tile,
    chunk_tokens,
    max_chunks,
    N_KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
    AT_ONCE: tl.constexpr = 128,
):
    """Each program writes the items of its ROWS rows, and counts those of the rows before. A row
    of length 0 has one empty item: its output is written too. HEADS, COLUMNS: N_KV_HEADS and
    max_chunks padded."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    mine = tl.program_id(0) * ROWS
    before = tl.zeros([AT_ONCE], tl.int32)
    for start in range(0, mine, AT_ONCE):
        rows = start + tl.arange(0, AT_ONCE)
        _, _, _, n_chunks = _cut(seq_lens, rows, mine, window, tile, chunk_tokens, max_chunks)
        before += n_chunks
    n_before = tl.sum(before, 0)

    rows = mine + tl.arange(0, ROWS)
    first, lens, chunk, n_chunks = _cut(
        seq_lens, rows, n_rows, window, tile, chunk_tokens, max_chunks
    )
    if mine + ROWS >= n_rows:
        tl.store(n_items, n_before + tl.sum(n_chunks, 0))
    column = tl.arange(0, COLUMNS)
    exists = n_chunks[:, None] > column[None, :]
    ones = exists.to(tl.int32)
    of_column = tl.sum(ones, 0)
    place = n_before + tl.cumsum(of_column, 0) - of_column + tl.cumsum(ones, 0) - 1
    place = items + 4 * place
    start = first[:, None] + chunk[:, None] * column[None, :]
    tl.store(place, rows[:, None] + tl.zeros_like(start), mask=exists)
    tl.store(place + 1, start, mask=exists)
    tl.store(place + 2, tl.minimum(start + chunk[:, None], lens[:, None]), mask=exists)
    tl.store(place + 3, column[None, :] + (n_chunks[:, None] << 16), mask=exists)
    head = tl.arange(0, HEADS)
    counter = rows[:, None] * N_KV_HEADS + head[None, :]
    counted = (rows < n_rows)[:, None] & (head < N_KV_HEADS)[None, :]
    tl.store(arrived + counter, tl.zeros_like(counter), mask=counted)

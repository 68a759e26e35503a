"""How a linear layer for few rows is cut into programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# Shared memory of a multiprocessor of compute capability 9.0, and what each program takes of it
# beside its stages: the driver's own, barriers, and room to turn a result around.
_SHARED_BYTES = 228 * 1024
_RESERVED_BYTES = 1024 + 128
_MAX_SCRATCH_BYTES = 16 * 1024
_MAX_STAGES = 12


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """Fields that are not in `order` change the speed of a layer and not its bits."""

    block_n: int = 64
    """Rows of w to a tile, half of them gate and half up in a gated layer. Under 64 it is another
    matrix instruction, with an order of its own."""
    block_k: int = 128
    splits: int = 1
    """Parts of K, each summed by another program."""
    warps: int = 4
    block_rows: int = 64
    """Rows of x to a tile, at most."""
    tma: bool = True
    """Whether loads go through the tensor memory accelerator, if the card and the layer allow."""
    share: int = 2
    """The part of a multiprocessor's shared memory that holds one program's loads in flight, as its
    reciprocal. What the programs of a kernel leave is for those of the next."""
    programs: int = 1
    """With `tma`, programs to a multiprocessor, at most: each goes on to another tile."""
    prefetch: int = 4
    """Without `tma`, steps of block_k brought into L2 while the kernel in front runs."""

    @property
    def order(self) -> tuple[int, bool]:
        """Of the sums: equal for configurations that give the same bits."""
        return self.splits, self.block_n >= 64

    def rows_tile(self, rows: int) -> int:
        return min(max(16, 1 << (rows - 1).bit_length()), self.block_rows)

    def steps(self, k: int) -> int:
        """Of block_k, for each split."""
        return -(-k // (self.block_k * self.splits))

    def stages(self, rows: int, itemsize: int, steps: int) -> int:
        """Steps in flight: what `steps` need and the memory allows."""
        block_rows = self.rows_tile(rows)
        stage_bytes = (self.block_n + block_rows) * self.block_k * itemsize
        scratch = min(4 * self.block_n * block_rows, _MAX_SCRATCH_BYTES)
        budget = _SHARED_BYTES // self.share - _RESERVED_BYTES - scratch
        return max(2, min(budget // stage_bytes, _MAX_STAGES, steps))


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with all it takes."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> None:
        self.kernel[self.grid](*self.arguments, **self.options)

    def compile(self) -> None:
        """Without a launch."""
        self.kernel.warmup(*self.arguments, grid=self.grid, **self.options)


Table = dict[tuple[int, int], dict[int, SkinnyConfig | None]]
"""By (rows of w, K), then by the most rows of x that an entry serves; None: cuBLAS is better."""

# Measured by benchmarks/gpu/skinny.py on an H200. One number of splits for all entries up to 64
# rows: the bits of a row are the same for each of these counts, and change at 65 and 129.
_FEW = SkinnyConfig(splits=8, programs=2)
_TUNED: Table = {
    # Qwen3-0.6B: QKV, attention's output, the MLP's output, the head.
    (4096, 1024): {
        32: SkinnyConfig(splits=4, programs=2),
        64: SkinnyConfig(splits=4),
        128: SkinnyConfig(block_k=64, splits=2, block_rows=128, share=1),
        256: SkinnyConfig(block_k=64, block_rows=128, share=1),
    },
    (1024, 2048): {
        64: _FEW,
        128: SkinnyConfig(block_k=64, splits=8, block_rows=128, programs=2),
        256: SkinnyConfig(block_k=64, splits=4, block_rows=128, share=1),
    },
    (1024, 3072): {
        64: _FEW,
        128: SkinnyConfig(block_k=64, splits=8, block_rows=128, share=1),
        256: SkinnyConfig(block_k=64, splits=4, block_rows=128, share=1),
    },
    (151936, 1024): {
        64: SkinnyConfig(block_n=128, share=1),
        128: SkinnyConfig(block_n=128, block_k=64, warps=8, block_rows=128, share=1),
    },
    # Llama-3.1-8B, likewise.
    (6144, 4096): {
        64: SkinnyConfig(splits=4, share=1),
        128: SkinnyConfig(block_k=64, block_rows=128, share=1),
    },
    (4096, 4096): {
        64: SkinnyConfig(splits=4, share=1),
        128: SkinnyConfig(block_k=64, splits=2, block_rows=128, share=1),
        256: SkinnyConfig(block_k=64, splits=2, block_rows=256, share=1),
    },
    (4096, 14336): {
        64: SkinnyConfig(splits=2, share=1),
        128: SkinnyConfig(block_k=64, splits=2, block_rows=128, share=1),
        256: SkinnyConfig(block_k=64, splits=2, block_rows=256, share=1),
    },
    (128256, 4096): {
        32: SkinnyConfig(share=1),
        64: SkinnyConfig(block_n=128, share=1),
        128: SkinnyConfig(block_n=256, block_k=64, warps=8, block_rows=128, share=1),
    },
}
_TUNED_GATED: Table = {
    (6144, 1024): {
        64: SkinnyConfig(share=1),
        128: SkinnyConfig(block_k=64, block_rows=128, share=1),
        256: SkinnyConfig(block_k=64, block_rows=128, programs=2),
    },
    (28672, 4096): {
        64: SkinnyConfig(share=1),
        128: SkinnyConfig(block_n=128, block_k=64, warps=8, block_rows=128, programs=2),
        256: SkinnyConfig(block_n=128, block_k=64, warps=8, block_rows=256, share=1),
    },
}
_TUNED_SMS = 132
_MAX_UNTUNED_ROWS = 64


def choose_config(
    rows: int, n: int, k: int, dtype: torch.dtype, sms: int, *, max_splits: int = 8
) -> SkinnyConfig | None:
    """For x [rows, k] @ w [n, k]^T on a card of `sms` multiprocessors; None where cuBLAS is better.

    The bits of a row are the same for 1 to 64 rows.
    """
    if dtype.itemsize != 2 or rows == 0:
        return None
    table = _TUNED.get((n, k), {})
    if sms == _TUNED_SMS and all(c is None or c.splits <= max_splits for c in table.values()):
        for most_rows, config in table.items():
            if rows <= most_rows:
                return config
    return _untuned(rows, n, k, sms, max_splits)


def choose_gated_config(
    rows: int, inner: int, k: int, dtype: torch.dtype, sms: int
) -> SkinnyConfig | None:
    """The same for silu(x @ gate^T) * (x @ up^T), w [2 * inner, k]: never split."""
    if dtype.itemsize != 2 or rows == 0:
        return None
    if sms == _TUNED_SMS:
        for most_rows, config in _TUNED_GATED.get((2 * inner, k), {}).items():
            if rows <= most_rows:
                return config
    return _untuned(rows, 2 * inner, k, sms, max_splits=1)


def _untuned(rows: int, n: int, k: int, sms: int, max_splits: int) -> SkinnyConfig | None:
    """Splits that give most multiprocessors a tile; with more rows tiles that read x less often."""
    if rows > _MAX_UNTUNED_ROWS:
        return None
    tiles = -(-n // 64)
    splits = 1
    while splits * 2 <= max_splits and 10 * tiles * splits < 9 * sms and k >= 512 * splits:
        splits *= 2
    if rows > 16 and tiles * splits >= 2 * sms:
        return SkinnyConfig(block_n=128, block_k=64, splits=splits)
    return SkinnyConfig(block_k=128 if k % (128 * splits) == 0 else 64, splits=splits)

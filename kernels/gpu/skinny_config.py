"""How a linear layer for few rows is cut into programs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Of one multiprocessor of compute capability 9.0, and what the driver keeps of it for each program.
_SHARED_BYTES = 228 * 1024
_RESERVED_BYTES = 1024
_MAX_STAGES = 8


@dataclass(frozen=True)
class SkinnyConfig:
    """The bits of a result depend on `splits`, on whether `block_n` is under 64 (which is another
    matrix instruction) and on nothing else here."""

    block_n: int = 64
    """Rows of w to a tile; half of them gate and half up in a gated layer."""
    block_k: int = 128
    splits: int = 1
    """Parts of K, each summed by another program."""
    warps: int = 4
    residency: int = 2
    """Programs that are to fit on a multiprocessor: they share its memory for loads in flight."""
    prefetch: int = 4
    """Steps of block_k asked for before the kernel in front has finished."""
    block_rows: int = 64
    """Rows of x to a tile, at most."""

    def rows_tile(self, rows: int) -> int:
        return min(max(16, 1 << (rows - 1).bit_length()), self.block_rows)

    def steps(self, k: int) -> int:
        """Of block_k, for each split."""
        return -(-k // (self.block_k * self.splits))

    def stages(self, rows: int, itemsize: int) -> int:
        """Loads in flight: as many as the memory allows."""
        stage_bytes = (self.block_n + self.rows_tile(rows)) * self.block_k * itemsize
        budget = _SHARED_BYTES // self.residency - _RESERVED_BYTES
        return max(2, min(_MAX_STAGES, budget // stage_bytes))


_MAX_ROWS = 64


def choose_config(
    rows: int, n: int, k: int, dtype: torch.dtype, sms: int, *, max_splits: int = 8
) -> SkinnyConfig | None:
    """For x [rows, k] @ w [n, k]^T on a card of `sms` multiprocessors; None where cuBLAS is better.

    One choice serves 1 to 64 rows, so that the bits of a row do not change between these counts.
    """
    if dtype.itemsize != 2 or not 0 < rows <= _MAX_ROWS:
        return None
    tiles = -(-n // 64)
    splits = 1
    while splits * 2 <= max_splits and 10 * tiles * splits < 9 * sms and k >= 512 * splits:
        splits *= 2
    block_k = 128 if k % (128 * splits) == 0 else 64
    return SkinnyConfig(block_k=block_k, splits=splits, residency=_residency(tiles * splits, sms))


def choose_gated_config(
    rows: int, inner: int, k: int, dtype: torch.dtype, sms: int
) -> SkinnyConfig | None:
    """The same for silu(x @ gate^T) * (x @ up^T), w [2 * inner, k]: never split."""
    return choose_config(rows, 2 * inner, k, dtype, sms, max_splits=1)


def _residency(programs: int, sms: int) -> int:
    """All programs at once where three to a multiprocessor suffice."""
    return min(3, -(-programs // sms))

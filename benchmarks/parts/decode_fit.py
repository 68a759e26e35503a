"""Which configurations of the decode attention a multiprocessor takes as often as they claim."""

from __future__ import annotations

from typing import Final

import torch

from pagemesh.kernels.gpu.decode_plan import DecodeConfig

SHARED_BYTES: Final = 227 * 1024
_SCRATCH_BYTES: Final = 10 * 1024
"""Of a program: the rearrangements at its end, of the query heads of several rows."""
_MOST_WARPS: Final = 24


def fits(
    config: DecodeConfig,
    head_dim: int,
    dtype: torch.dtype,
    *,
    least_bytes: int,
    least_warps: int,
) -> bool:
    """With at least so many bytes in flight and so many warps to a multiprocessor."""
    programs, warps = config.programs_per_sm, config.num_warps * config.programs_per_sm
    tile_bytes = 2 * config.tile_tokens * head_dim * dtype.itemsize
    loaded_bytes = (config.num_stages - 1) * tile_bytes
    return (
        (loaded_bytes + _SCRATCH_BYTES) * programs <= SHARED_BYTES
        and loaded_bytes * programs >= least_bytes
        and least_warps <= warps <= _MOST_WARPS
        and config.tile_tokens // 16 >= config.num_warps // 2
    )

"""The KV pool: one allocation for all layers, cut into pages."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pagemesh.kernels.cpu.memory import zeros
from pagemesh.worker_svc.models.config import DecoderConfig


class KVCache:
    """`k[layer]` and `v[layer]` are views [num_blocks, n_kv_heads, block_tokens, head_dim] of
    `pool` [n_layers, 2, …]. Within a page the kernels that read it choose the order: the CPU's keep
    a page of keys as [head_dim, block_tokens].

    Starts as zeros. Block 0 is the null block: nothing may write it, so that it stays zero.
    """

    def __init__(
        self,
        config: DecoderConfig,
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        pages = (num_blocks, config.n_kv_heads, block_tokens, config.head_dim)
        shape = (config.n_layers, 2, *pages)
        self.pool = _zeros(shape, dtype, torch.device(device))
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.k: list[Tensor] = [layer[0] for layer in self.pool]
        self.v: list[Tensor] = [layer[1] for layer in self.pool]

    def copy_blocks(self, src: Tensor, dst: Tensor) -> None:
        """Copy blocks src int64[N] over blocks dst int64[N], in every layer.

        All reads come before all writes, so a block may be both a source and a destination.
        """
        for layer in self.pool:  # the copy on its way is of one layer only
            layer[:, dst] = layer[:, src]

    @staticmethod
    def bytes_per_token(config: DecoderConfig, dtype: torch.dtype) -> int:
        return 2 * config.n_layers * config.n_kv_heads * config.head_dim * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU, pages that no request has used take no memory yet."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    n_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(zeros(n_bytes, "u1")).view(dtype).view(shape)

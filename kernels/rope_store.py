"""From the linear layer of an attention block to its rotated queries, keys and values stored."""

from __future__ import annotations

import torch
from torch import Tensor

from pagemesh.kernels.attention import store_kv
from pagemesh.kernels.linear import join_splits
from pagemesh.kernels.norm import rms_norm
from pagemesh.kernels.rope import apply_rope


def rope_store(
    qkv: Tensor,
    positions: Tensor,
    rotations: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    n_heads: int,
    bias: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """The rotated queries [T, Hq, D] in the caches' dtype; K and V go to their pages.

    `qkv` is [T, (Hq + 2 Hkv) D] or its K-splits float32[S, T, ...], queries first, then keys, then
    values, without the linear layer's `bias`. `rotations` float32[max positions, D] holds for each
    position D/2 cosines, then as many sines, and `positions` int64[T] chooses its rows.
    `q_norm` and `k_norm` [D], given together, are the weights of an RMSNorm of each head, `eps`
    its epsilon.
    `slot_mapping` int64[T] and the caches are those of store_kv.
    """
    n_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    heads = join_splits(qkv, k_cache.dtype, bias).view(-1, n_heads + 2 * n_kv_heads, head_dim)
    q, k, v = torch.split(heads, [n_heads, n_kv_heads, n_kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    q, k = apply_rope(q, k, *rotations[positions].chunk(2, dim=-1))
    store_kv(k, v, k_cache, v_cache, slot_mapping)
    return q

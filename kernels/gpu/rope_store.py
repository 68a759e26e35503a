"""From the linear layer of an attention block to its rotated queries, keys and values stored.

A program takes a few heads of one kind (query, key or value) of one token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from pagemesh.kernels.gpu.kernel import kernel
from pagemesh.kernels.gpu.launch import cdiv, next_power_of_2, pdl
from pagemesh.kernels.gpu.splits import load_joined, rounded, split_shape


@dataclass(frozen=True, slots=True)
class RopeStoreConfig:
    """How a token is shared out. The order of a head's norm follows from this, so nothing here may
    depend on the other tokens."""

    heads: int
    """Of a program; a power of two."""
    num_warps: int


def choose_config(head_dim: int) -> RopeStoreConfig:
    """Two times eight elements a thread: 16 bytes of a 16-bit type from each half of a head."""
    heads = 8
    threads = heads * next_power_of_2(head_dim) // 16
    return RopeStoreConfig(heads=heads, num_warps=max(threads // 32, 1))


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
    config: RopeStoreConfig | None = None,
) -> Tensor:
    """See kernels/rope_store.py. The caches must be contiguous, block_tokens a power of two."""
    tokens, (_, n_kv_heads, block_tokens, head_dim) = qkv.shape[-2], k_cache.shape
    q = torch.empty(tokens, n_heads, head_dim, dtype=k_cache.dtype, device=qkv.device)
    if tokens == 0:
        return q
    config = config or choose_config(head_dim)
    splits, split_stride = split_shape(qkv)
    programs = cdiv(n_heads, config.heads) + 2 * cdiv(n_kv_heads, config.heads)
    _rope_store_kernel[(tokens * programs,)](
        qkv,
        split_stride,
        bias,
        q_norm,
        k_norm,
        eps,
        positions,
        rotations,
        slot_mapping,
        q,
        k_cache,
        v_cache,
        Q_HEADS=n_heads,
        KV_HEADS=n_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_TOKENS=block_tokens,
        HEADS=config.heads,
        HALF=next_power_of_2(head_dim // 2),
        SPLITS=splits,
        PDL=pdl(),
        num_warps=config.num_warps,
        launch_pdl=pdl(),
        # The reference rounds each product of the rotation before it adds them.
        enable_fp_fusion=False,
    )
    return q


@kernel()
def _rope_store_kernel(
    qkv,
    split_stride,
    bias,
    q_norm,
    k_norm,
    eps,
    positions,
    rotations,
    slot_mapping,
    q,
    k_cache,
    v_cache,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    dtype: tl.constexpr = q.dtype.element_ty
    q_programs: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    kv_programs: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    programs: tl.constexpr = q_programs + 2 * kv_programs
    token = (tl.program_id(0) // programs).to(tl.int64)
    part = tl.program_id(0) % programs
    is_query = part < q_programs
    is_value = part >= q_programs + kv_programs
    part -= tl.where(is_query, 0, tl.where(is_value, q_programs + kv_programs, q_programs))
    first = tl.where(is_query, 0, tl.where(is_value, Q_HEADS + KV_HEADS, Q_HEADS))

    head = part * HEADS + tl.arange(0, HEADS)[:, None]
    # What all heads share is loaded once for each: one layout for everything, none converted.
    column = tl.broadcast_to(tl.arange(0, HALF)[None, :], (HEADS, HALF))
    mask = (head < tl.where(is_query, Q_HEADS, KV_HEADS)) & (column < HEAD_DIM // 2)
    low_at = (first + head) * HEAD_DIM + column
    high_at = low_at + HEAD_DIM // 2
    # Weights first: nothing earlier in the step writes them.
    if bias is not None:
        low_bias = tl.load(bias + low_at, mask=mask, other=0.0)
        high_bias = tl.load(bias + high_at, mask=mask, other=0.0)
    if q_norm is not None:
        gain = tl.where(is_query, q_norm, k_norm) + column
        low_gain = tl.load(gain, mask=mask, other=0.0)
        high_gain = tl.load(gain + HEAD_DIM // 2, mask=mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()

    # Small, and read again in the next layer: kept, while the matrices stream through the cache.
    slot = tl.load(slot_mapping + token, eviction_policy="evict_last")
    position = tl.load(positions + token, eviction_policy="evict_last")
    qkv += token * ((Q_HEADS + 2 * KV_HEADS) * HEAD_DIM)
    low = load_joined(qkv, low_at, mask, split_stride, SPLITS)
    high = load_joined(qkv, high_at, mask, split_stride, SPLITS)
    if bias is not None:
        low += low_bias
        high += high_bias
    low, high = rounded(low, dtype), rounded(high, dtype)
    if not is_value:
        turn = rotations + position * HEAD_DIM + column
        cos = tl.load(turn, mask=mask, other=0.0, eviction_policy="evict_last")
        sin = tl.load(turn + HEAD_DIM // 2, mask=mask, other=0.0, eviction_policy="evict_last")
        if q_norm is not None:
            squares = tl.sum(low * low + high * high, axis=1)
            scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
            low = rounded(rounded(low * scale, dtype) * low_gain, dtype)
            high = rounded(rounded(high * scale, dtype) * high_gain, dtype)
        low, high = low * cos - high * sin, high * cos + low * sin

    if is_query:
        out = q + token * (Q_HEADS * HEAD_DIM) + head * HEAD_DIM + column
    else:
        block, offset = slot // BLOCK_TOKENS, slot % BLOCK_TOKENS
        place = (block * KV_HEADS + head) * BLOCK_TOKENS + offset
        out = tl.where(is_value, v_cache, k_cache) + place * HEAD_DIM + column
        mask = mask & (head < tl.where(slot >= 0, KV_HEADS, 0))
    tl.store(out, low, mask=mask)
    tl.store(out + HEAD_DIM // 2, high, mask=mask)

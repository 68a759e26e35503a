"""Paged attention and the KV store, in plain torch: the reference of the GPU kernels.

K and V live in pages `[num_blocks, n_kv_heads, block_tokens, head_dim]`; a row's block table maps
its positions to pages. Block 0 is the null block: it is never written and so stays zero.
Memory past a sequence's end is never used, not even multiplied by zero: a page may still hold the
NaN of the request that owned it before.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pagemesh.kernels.attention_plan import (
    AttentionPlan,
    DecodeGroup,
    Pages,
    PrefillRow,
    plan_attention,
)
from pagemesh.kernels.inputs import AttentionInputs


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write k, v [T, Hkv, D] to their slots (int64[T]) of the caches; slot -1 writes nothing."""
    block_tokens = k_cache.shape[2]
    keep = (slot_mapping >= 0)[:, None, None]
    slots = slot_mapping.clamp_min(0)
    block, offset = slots // block_tokens, slots % block_tokens
    for new, cache in ((k, k_cache), (v, v_cache)):
        cache[block, :, offset] = new.where(keep, cache[block, :, offset])


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    inputs: AttentionInputs,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Causal attention of q [T, Hq, D] over the pages of each row; returns [T, Hq, D].

    With `window` a token sees itself and the window - 1 tokens before it. Hq must be a multiple of
    Hkv; query head h reads KV head h // (Hq // Hkv). Padding rows and tokens give zeros.
    """
    out = q.new_zeros(q.shape)
    plan = _plan(inputs, Pages.of(k_cache), window)
    for group in plan.decodes:
        out[group.rows] = _decode(q[group.rows], k_cache, v_cache, group, scale)
    for row in plan.prefills:
        out[row.tokens] = _prefill(q[row.tokens], k_cache, v_cache, row, scale)
    return out


def _plan(inputs: AttentionInputs, pages: Pages, window: int | None) -> AttentionPlan:
    key = (pages, window)
    if key not in inputs.plans:
        inputs.plans[key] = plan_attention(inputs, pages, window)
    plan: AttentionPlan = inputs.plans[key]
    return plan


def _decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, group: DecodeGroup, scale: float
) -> Tensor:
    """q [n, Hq, D]: the query heads of one KV head become SDPA's query axis."""
    k, v = (_gather(cache, group.pages, q.shape[0]) for cache in (k_cache, v_cache))
    for gathered in (k, v):
        gathered.view(-1, q.shape[-1]).index_fill_(0, group.stale, 0)
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[2])
    return scaled_dot_product_attention(grouped, k, v, attn_mask=group.seen, scale=scale).flatten(
        1, 2
    )


def _prefill(q: Tensor, k_cache: Tensor, v_cache: Tensor, row: PrefillRow, scale: float) -> Tensor:
    """q [n, Hq, D]: one sequence."""
    k, v = (_gather(cache, row.pages, 1)[:, :, : row.n_keys] for cache in (k_cache, v_cache))
    mixed = scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k,
        v,
        attn_mask=row.seen,
        is_causal=row.seen is None,
        scale=scale,
        enable_gqa=True,
    )
    return mixed[0].transpose(0, 1)


def _gather(cache: Tensor, pages: Tensor, n: int) -> Tensor:
    """A copy [n, Hkv, L, D] of the pages at `pages` (see Pages.indices)."""
    num_blocks, n_kv_heads, block_tokens, head_dim = cache.shape
    rows = cache.view(num_blocks * n_kv_heads, block_tokens * head_dim)
    return rows.index_select(0, pages).view(n, n_kv_heads, -1, head_dim)

"""Paged attention and the KV store, in plain torch: the reference of the GPU kernels.

K and V live in pages `[num_blocks, n_kv_heads, block_tokens, head_dim]`; a row's block table maps
its positions to pages. Block 0 is the null block: it is never written and so stays zero.
Memory past a sequence's end is never used, not even multiplied by zero: a page may still hold the
NaN of the request that owned it before.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pagemesh.kernels.inputs import AttentionInputs

# Elements of K gathered at once for decode rows (64 MiB in float32).
_GATHER_ELEMENTS = 2**24


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write k, v [T, Hkv, D] to their slots (int64[T]) of the caches; slot -1 writes nothing."""
    block_tokens = k_cache.shape[2]
    keep = (slot_mapping >= 0)[:, None, None]
    slots = slot_mapping.clamp_min(0)
    block, offset = slots // block_tokens, slots % block_tokens
    for new, cache in ((k, k_cache), (v, v_cache)):
        cache[block, :, offset] = torch.where(keep, new, cache[block, :, offset])


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
    Hkv; query head h reads KV head h // (Hq // Hkv). Padding rows and tokens give zeros. The
    host reads the lengths.
    """
    out = torch.zeros_like(q)
    lens = inputs.seq_lens.tolist()
    _decode_rows(out, q, k_cache, v_cache, inputs, lens[: inputs.n_decode], scale, window)
    bounds = inputs.query_start.tolist()
    for row in range(inputs.n_decode, len(lens)):
        tokens = slice(bounds[row], bounds[row + 1])
        if lens[row] > 0 and tokens.start < tokens.stop:
            table = inputs.block_tables[row]
            out[tokens] = _prefill_row(q[tokens], k_cache, v_cache, table, lens[row], scale, window)
    return out


def _decode_rows(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    inputs: AttentionInputs,
    lens: list[int],
    scale: float,
    window: int | None,
) -> None:
    _, n_kv_heads, block_tokens, head_dim = k_cache.shape
    block_elements = n_kv_heads * block_tokens * head_dim
    spans = [_span_blocks(length, block_tokens, window) for length in lens]
    for group in _groups_of_like_length(spans, _GATHER_ELEMENTS // block_elements):
        rows = torch.tensor(group, device=q.device)
        out[rows] = _decode_group(
            q[rows],
            k_cache,
            v_cache,
            inputs.block_tables[rows],
            inputs.seq_lens[rows],
            spans[group[0]],
            scale,
            window,
        )


def _span_blocks(length: int, block_tokens: int, window: int | None) -> int:
    """How many blocks a decode row may have to read (at least one)."""
    blocks = max(1, -(-length // block_tokens))
    return blocks if window is None else min(blocks, -(-window // block_tokens) + 1)


def _groups_of_like_length(spans: list[int], max_blocks: int) -> Iterator[list[int]]:
    """Rows in groups, longest first, so that no row is padded to more than about twice its span."""
    order = sorted(range(len(spans)), key=spans.__getitem__, reverse=True)
    while order:
        longest = spans[order[0]]
        size = max(1, min(len(order), max_blocks // longest))
        while spans[order[size - 1]] * 2 < longest - 1:
            size -= 1
        yield order[:size]
        order = order[size:]


def _decode_group(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    lens: Tensor,
    n_blocks: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """q [n, Hq, D]: one token per row. The query heads of one KV head become SDPA's query axis."""
    n, _, head_dim = q.shape
    n_kv_heads, block_tokens = k_cache.shape[1:3]
    lens = lens[:, None]
    first_block = torch.zeros_like(lens) if window is None else (lens - window).clamp_min(0)
    first_block = first_block // block_tokens
    columns = first_block + torch.arange(n_blocks, device=q.device)
    known = columns * block_tokens < lens
    blocks = tables.gather(1, columns.clamp_max(tables.shape[1] - 1)).where(known, 0)
    positions = first_block * block_tokens + torch.arange(n_blocks * block_tokens, device=q.device)
    # A padding row attends to one zero: a softmax over nothing would be NaN.
    seen = positions < lens.clamp_min(1)
    if window is not None:
        seen &= positions >= lens - window
    k, v = (_gather_pages(cache, blocks) for cache in (k_cache, v_cache))
    for gathered in (k, v):
        _clear_tail(gathered, positions >= lens, known, block_tokens)
    grouped = q.view(n, n_kv_heads, -1, head_dim)
    mixed = scaled_dot_product_attention(
        grouped, k, v, attn_mask=seen[:, None, None, :], scale=scale
    )
    return mixed.reshape(q.shape)


def _gather_pages(cache: Tensor, blocks: Tensor) -> Tensor:
    """The pages `blocks` [n, m] of a cache as one copy [n, Hkv, m * block_tokens, D]."""
    num_blocks, n_kv_heads, block_tokens, head_dim = cache.shape
    heads = torch.arange(n_kv_heads, device=cache.device)[:, None]
    pages = (blocks[:, None, :] * n_kv_heads + heads).flatten()
    rows = cache.view(num_blocks * n_kv_heads, block_tokens * head_dim).index_select(0, pages)
    return rows.view(blocks.shape[0], n_kv_heads, -1, head_dim)


def _clear_tail(gathered: Tensor, past_end: Tensor, known: Tensor, block_tokens: int) -> None:
    """Zero what lies past each row's end. Only the last known block of a row can hold anything."""
    n, n_kv_heads, _, head_dim = gathered.shape
    pages = gathered.view(n, n_kv_heads, -1, block_tokens, head_dim)
    rows = torch.arange(n, device=gathered.device)
    last = (known.sum(1) - 1).clamp_min(0)
    stale = past_end.view(n, -1, block_tokens)[rows, last]
    pages[rows, :, last] = pages[rows, :, last].masked_fill(stale[:, None, :, None], 0)


def _prefill_row(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    length: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """q [n, Hq, D]: the last n tokens of a sequence of `length` tokens."""
    n, block_tokens = q.shape[0], k_cache.shape[2]
    first_block = 0 if window is None else max(0, length - n - window + 1) // block_tokens
    first = first_block * block_tokens
    blocks = table[first_block : -(-length // block_tokens)]
    k, v = (
        _gather_pages(cache, blocks[None])[:, :, : length - first] for cache in (k_cache, v_cache)
    )
    whole = n == length and (window is None or window >= length)
    mask = None if whole else _causal_mask(n, first, length, window, q.device)
    mixed = scaled_dot_product_attention(
        q.transpose(0, 1)[None], k, v, attn_mask=mask, is_causal=whole, scale=scale, enable_gqa=True
    )
    return mixed[0].transpose(0, 1)


def _causal_mask(
    n: int, first: int, length: int, window: int | None, device: torch.device
) -> Tensor:
    """bool[n, length - first]: which keys (positions first …) the last n positions see."""
    queries = torch.arange(length - n, length, device=device)[:, None]
    keys = torch.arange(first, length, device=device)
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)

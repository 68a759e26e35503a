"""The attention of torch's libraries for the prompts of prefill_cells.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from parts.prefill_cells import DEVICE, DTYPE, Layer, Prompts, Rows


def contiguous(steps: list[Rows], layer: Layer, backend: SDPBackend) -> Callable[[], object]:
    """On keys and values in one piece. Of every step all rows are alike."""
    calls = [_contiguous_step(rows, layer) for rows in steps]
    return partial(_run, calls, backend)


def gathered(
    prompts: tuple[Prompts, list[Rows]], layer: Layer, backend: SDPBackend
) -> Callable[[], object]:
    """On pages that are put in one piece first; the result stays where the library leaves it."""
    batch, steps = prompts
    ends = torch.tensor([0, *(len(rows) * rows[0][0] for rows in steps)]).cumsum(0).tolist()
    calls = [
        partial(_gathered_step, batch, step, rows, batch.q[start : start + len(rows) * rows[0][0]])
        for step, (rows, start) in enumerate(zip(steps, ends, strict=False))
    ]
    return partial(_run, calls, backend)


def _run(calls: list[Callable[[], object]], backend: SDPBackend) -> None:
    with sdpa_kernel(backend):
        for call in calls:
            call()


def _contiguous_step(rows: Rows, layer: Layer) -> Callable[[], object]:
    n_tokens, context = rows[0]
    shapes = [(layer.n_heads, n_tokens), *[(layer.n_kv_heads, context)] * 2]
    q, k, v = (
        torch.randn(len(rows), heads, n, layer.head_dim, dtype=DTYPE, device=DEVICE)
        for heads, n in shapes
    )
    return partial(_attend, q, k, v)


def _gathered_step(batch: Prompts, step: int, rows: Rows, q: Tensor) -> None:
    n_tokens, context = rows[0]
    table = batch.steps[step].block_tables[:, : -(-context // batch.k_cache.shape[2])]
    k, v = (
        cache[table.flatten()]
        .view(len(rows), -1, *cache.shape[1:])
        .transpose(1, 2)
        .flatten(2, 3)[:, :, :context]
        for cache in (batch.k_cache, batch.v_cache)
    )
    _attend(q.view(len(rows), n_tokens, *q.shape[1:]).transpose(1, 2), k, v)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.shape[2] == k.shape[2]:
        scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    else:
        mask = causal_lower_right(q.shape[2], k.shape[2])
        scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

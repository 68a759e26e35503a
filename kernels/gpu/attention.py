"""Paged attention of a mixed step: decode rows through one kernel, the others through another."""

from __future__ import annotations

import torch
from torch import Tensor

from pagemesh.kernels.gpu import prefill_hopper
from pagemesh.kernels.gpu.decode_attention import decode_attention
from pagemesh.kernels.gpu.prefill_attention import prefill_attention
from pagemesh.kernels.inputs import AttentionInputs


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

    The twin of `kernels.attention.paged_attention`. A step of decode rows alone takes one kernel,
    unless it has `counts`, which only the device reads. Padding tokens count as a part of the
    prefill rows, whose kernel is the one for Hopper wherever it fits
    (benchmarks/gpu/prefill_attention.py compares them, and libraries).
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    n_decode = inputs.n_decode
    if n_decode:
        decodes = q[:n_decode]
        decode_attention(
            decodes, k_cache, v_cache, inputs, scale=scale, window=window, out=out[:n_decode]
        )
    # The decode kernel writes to no row but decode rows.
    if n_decode < q.shape[0] or inputs.counts is not None:
        fits = prefill_hopper.fits(q, k_cache, v_cache, out)
        prefill = prefill_hopper.prefill_attention_hopper if fits else prefill_attention
        prefill(q, k_cache, v_cache, inputs, scale=scale, window=window, out=out)
    return out

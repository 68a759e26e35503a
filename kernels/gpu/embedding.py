"""The first rows of a step: embeddings gathered and normalised at once. One program a row."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from pagemesh.kernels.gpu.kernel import kernel
from pagemesh.kernels.gpu.launch import next_power_of_2, pdl
from pagemesh.kernels.gpu.norm import NormConfig, choose_config, normalised


def embed_rms_norm(
    token_ids: Tensor,
    table: Tensor,
    weight: Tensor,
    eps: float,
    *,
    config: NormConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """(RMSNorm of the embeddings, the embeddings), both [T, H].

    token_ids int32 or int64[T] choose rows of table [V, H]; weight [H]. An id outside the
    vocabulary reads memory that is not the table's.
    """
    (rows,), hidden = token_ids.shape, table.shape[1]
    total = torch.empty(rows, hidden, dtype=table.dtype, device=table.device)
    normed = torch.empty_like(total)
    if rows:
        _embed_kernel[(rows,)](
            token_ids,
            table,
            weight,
            normed,
            total,
            eps,
            HIDDEN=hidden,
            BLOCK=next_power_of_2(hidden),
            PDL=pdl(),
            num_warps=(config or choose_config(hidden)).num_warps,
            launch_pdl=pdl(),
        )
    return normed, total


@kernel()
def _embed_kernel(
    token_ids,
    table,
    weight,
    normed,
    total,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    column = tl.arange(0, BLOCK)
    mask = column < HIDDEN
    gain = tl.load(weight + column, mask=mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ids + row).to(tl.int64)
    embedding = tl.load(table + token * HIDDEN + column, mask=mask, other=0.0)
    tl.store(total + row * HIDDEN + column, embedding, mask=mask)
    value = normalised(embedding.to(tl.float32), gain, eps, HIDDEN)
    tl.store(normed + row * HIDDEN + column, value, mask=mask)

"""Causal attention of prompt chunks over paged K and V, for Hopper's matrix instruction.

The same meaning and the same promise as prefill_attention.py, with what Triton cannot express:
pages come through the tensor memory accelerator, brought by a warp that does nothing else, and
warpgroups compute their softmax beside each other's matrix products.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from pagemesh.kernels.gpu.boxes import GLUON_TYPES, Boxes, boxes
from pagemesh.kernels.gpu.launch import multiprocessors, pdl
from pagemesh.kernels.gpu.prefill_hopper_kernel import prefill_hopper_kernel
from pagemesh.kernels.gpu.prefill_hopper_load import PANEL, ROWS, Cut
from pagemesh.kernels.gpu.skinny_tma import is_hopper
from pagemesh.kernels.inputs import AttentionInputs

LOG2_E: Final = math.log2(math.e)
HEAD_DIMS: Final = (64, 128)
PAGES: Final = (16, 32, 64, 128)
"""Tokens of a page."""
_NO_WINDOW: Final = 2**30
# Registers of a thread at the start, when all warpgroups (a loading one, too) have as many: the
# kernel then gives the loader's to the others.
_MAX_REGISTERS: Final = {2: 168, 3: 128}


@dataclass(frozen=True, slots=True)
class HopperConfig:
    """How the kernel is cut. `tile_tokens` decides the order of sums, the rest does not."""

    tile_tokens: int = 128
    """Keys of a tile."""
    stages: int = 2
    """Tiles of keys in shared memory, and as many of values."""
    query_stages: int = 2
    warpgroups: int = 2
    """That compute: 2 or 3, of 64 queries each."""
    turns: bool = True
    """Whether they issue their products in turn."""
    pack: bool = True
    """Whether a tile of queries holds several heads of few tokens, or one head of more."""


# By head dim.
_CONFIGS: Final = {64: HopperConfig(stages=4), 128: HopperConfig()}


def choose_config(head_dim: int) -> HopperConfig:
    return _CONFIGS[head_dim]


def fits(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> bool:
    """Whether the kernel takes these, on this device: 16-bit types, heads of 64 or 128, pages of 16
    to 128 tokens (a power of two), tokens and pages that begin at multiples of 16 bytes."""
    _, _, page, head_dim = k_cache.shape
    suits = q.dtype in GLUON_TYPES and head_dim in HEAD_DIMS and page in PAGES
    return suits and is_hopper() and all(_aligned(x) for x in (q, k_cache, v_cache, out))


def _aligned(x: Tensor) -> bool:
    """Whether what is behind the first dimension lies in one piece, and every piece is aligned."""
    whole = x.shape[0] == 0 or x[0].is_contiguous()
    return whole and x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0


def prefill_attention_hopper(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    inputs: AttentionInputs,
    *,
    scale: float,
    window: int | None = None,
    out: Tensor,
    config: HopperConfig | None = None,
) -> None:
    """Attention of the rows behind the decode rows, for tensors that `fits` takes; see
    `kernels.attention.paged_attention`.

    Writes out[n_decode:], zeros for padding. q [T, Hq, D] may have any stride between tokens.
    """
    n_tokens = q.shape[0]
    counted, n_rows = inputs.counts is not None, inputs.seq_lens.shape[0]
    n_decode = 0 if counted else inputs.n_decode
    if n_tokens == n_decode:
        return
    cut = make_cut(q, k_cache, config or choose_config(q.shape[2]), windowed=window is not None)
    most_blocks = (n_tokens - n_decode) // cut.block_tokens + n_rows - n_decode + 1
    prefill_hopper_kernel[(min(most_blocks * cut.bundles, multiprocessors()),)](
        boxes(q, q.shape, q.stride(), (cut.wg_tokens, cut.pack, PANEL.value)),
        _pages(k_cache, cut),
        _pages(v_cache, cut),
        out,
        inputs.query_start,
        inputs.seq_lens,
        inputs.block_tables,
        inputs.counts,
        inputs.block_tables.stride(0),
        n_tokens,
        n_rows,
        n_decode,
        window or _NO_WINDOW,
        out.stride(0),
        scale * LOG2_E,
        **cut.constants,
        COUNTED=counted,
        PDL=pdl(),
        num_warps=4,
        maxnreg=_MAX_REGISTERS[cut.warpgroups],
        launch_pdl=pdl(),
    )


def make_cut(q: Tensor, k_cache: Tensor, config: HopperConfig, *, windowed: bool) -> Cut:
    _, n_heads, head_dim = q.shape
    _, n_kv_heads, page, _ = k_cache.shape
    group = n_heads // n_kv_heads
    # The largest power of two that divides the group.
    pack = min(group & -group, ROWS.value) if config.pack else 1
    return Cut(
        group=group,
        pack=pack,
        bundles=n_heads // pack,
        page=page,
        head_dim=head_dim,
        tile=config.tile_tokens,
        stages=config.stages,
        query_stages=config.query_stages,
        warpgroups=config.warpgroups,
        turns=config.turns,
        windowed=windowed,
    )


def _pages(cache: Tensor, cut: Cut) -> Boxes:
    """[blocks, KV heads * page, head_dim]."""
    n_blocks, n_kv_heads, page, head_dim = cache.shape
    strides = cache.stride(0), head_dim, 1
    return boxes(cache, (n_blocks, n_kv_heads * page, head_dim), strides, (1, cut.box, PANEL.value))

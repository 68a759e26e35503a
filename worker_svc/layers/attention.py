"""Self-attention over the paged KV cache."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pagemesh.kernels.attention import paged_attention, store_kv
from pagemesh.kernels.inputs import AttentionInputs
from pagemesh.kernels.rope import apply_rope
from pagemesh.worker_svc.kv_cache import KVCache
from pagemesh.worker_svc.layers.linear import FusedLinear, Linear
from pagemesh.worker_svc.layers.norm import RMSNorm
from pagemesh.worker_svc.layers.weights import WeightViews
from pagemesh.worker_svc.models.config import DecoderConfig


class Attention(nn.Module):
    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.window = config.windows[layer]
        self.q_size = config.n_heads * config.head_dim
        self.kv_size = config.n_kv_heads * config.head_dim
        parts = {"q_proj": self.q_size, "k_proj": self.kv_size, "v_proj": self.kv_size}
        self.qkv = FusedLinear(
            config.hidden_size, parts, bias=config.qkv_bias, dtype=dtype, device=device
        )
        self.output = Linear(
            self.q_size,
            config.hidden_size,
            "o_proj",
            bias=config.output_bias,
            dtype=dtype,
            device=device,
        )
        norms = (
            RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype, device=device)
            for _ in range(2 * config.qk_norm)
        )
        self.q_norm, self.k_norm = next(norms, None), next(norms, None)

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], inputs: AttentionInputs, kv: KVCache
    ) -> Tensor:
        """x [T, H] to [T, H]; stores this step's K and V before attending."""
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim))
            for part in self.qkv(x).split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, k, *rotation)
        k_cache, v_cache = kv.k[self.layer], kv.v[self.layer]
        store_kv(k, v, k_cache, v_cache, inputs.slot_mapping)
        mixed = paged_attention(q, k_cache, v_cache, inputs, scale=self.scale, window=self.window)
        out: Tensor = self.output(mixed.flatten(-2))
        return out

    def weight_views(self, prefix: str) -> WeightViews:
        yield from self.qkv.weight_views(prefix)
        yield from self.output.weight_views(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.weight_views(f"{prefix}.q_norm")
            yield from self.k_norm.weight_views(f"{prefix}.k_norm")

"""The Llama-family decoder: one model, driven by its configuration."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from pagemesh.kernels.inputs import AttentionInputs
from pagemesh.worker_svc.kv_cache import KVCache
from pagemesh.worker_svc.layers.attention import Attention
from pagemesh.worker_svc.layers.mlp import MLP
from pagemesh.worker_svc.layers.norm import RMSNorm
from pagemesh.worker_svc.layers.rotary import Rotary
from pagemesh.worker_svc.layers.weights import WeightViews, empty_parameter
from pagemesh.worker_svc.models.config import DecoderConfig


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP. What a block adds travels beside the residual stream, so that
    the addition is fused with the norm that follows it."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.attention = Attention(config, layer, dtype=dtype, device=device)
        self.mlp_norm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.mlp = MLP(config, dtype=dtype, device=device)

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor,
        rotation: tuple[Tensor, Tensor],
        inputs: AttentionInputs,
        kv: KVCache,
    ) -> tuple[Tensor, Tensor]:
        normed, residual = self.attention_norm.add(hidden, residual)
        attended = self.attention(normed, rotation, inputs, kv)
        normed, residual = self.mlp_norm.add(attended, residual)
        return self.mlp(normed), residual

    def weight_views(self, prefix: str) -> WeightViews:
        yield from self.attention_norm.weight_views(f"{prefix}.input_layernorm")
        yield from self.attention.weight_views(f"{prefix}.self_attn")
        yield from self.mlp_norm.weight_views(f"{prefix}.post_attention_layernorm")
        yield from self.mlp.weight_views(f"{prefix}.mlp")


class Decoder(nn.Module):
    """The reference, and what holds the weights until a program for the CPU takes them over.

    Weights are uninitialised until a loader fills `weight_views`.
    """

    def __init__(
        self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.config = config
        vocab, size = config.vocab_size, config.hidden_size
        self.embedding = empty_parameter(vocab, size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, dtype=dtype, device=device)
            for layer in range(config.n_layers)
        )
        self.norm = RMSNorm(size, config.rms_norm_eps, dtype=dtype, device=device)
        self.rotary = Rotary(config.rope, config.head_dim, device)
        self.head = (
            self.embedding
            if config.tied_embeddings
            else empty_parameter(vocab, size, dtype=dtype, device=device)
        )

    def forward(
        self, token_ids: Tensor, positions: Tensor, inputs: AttentionInputs, kv: KVCache
    ) -> Tensor:
        """token_ids int64[T], positions int64[T]; returns the final hidden state [T, H].

        Writes K and V of the T tokens to `kv` at inputs.slot_mapping.
        """
        hidden = embedding(token_ids, self.embedding)
        rotation = self.rotary(positions)
        residual = torch.zeros_like(hidden)
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, rotation, inputs, kv)
        normed, _ = self.norm.add(hidden, residual)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, H] to float32[R, vocab]."""
        return linear(hidden, self.head).float()

    def weight_views(self) -> WeightViews:
        """Every tensor the checkpoint must have, with the place it goes to."""
        yield "model.embed_tokens.weight", self.embedding
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            yield from layer.weight_views(f"model.layers.{index}")
        yield from self.norm.weight_views("model.norm")
        if not self.config.tied_embeddings:
            yield "lm_head.weight", self.head

"""The Llama-family decoder on a GPU: a fixed sequence of kernels, the same eager and captured."""

from __future__ import annotations

from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from pagemesh.kernels.gpu.activation import silu_mul
from pagemesh.kernels.gpu.attention import paged_attention
from pagemesh.kernels.gpu.embedding import embed_rms_norm
from pagemesh.kernels.gpu.launch import multiprocessors
from pagemesh.kernels.gpu.norm import add_rms_norm
from pagemesh.kernels.gpu.rope_store import rope_store
from pagemesh.kernels.gpu.skinny import skinny_gate_up, skinny_linear
from pagemesh.kernels.gpu.skinny_config import choose_config, choose_gated_config
from pagemesh.kernels.inputs import AttentionInputs
from pagemesh.kernels.rope import rope_cos_sin
from pagemesh.worker_svc.kv_cache import KVCache
from pagemesh.worker_svc.layers.linear import FusedLinear
from pagemesh.worker_svc.models.decoder import Decoder, DecoderLayer


class Weights(NamedTuple):
    """A linear layer: w [N, K] and bias [N]."""

    w: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, layer: FusedLinear) -> Weights:
        return cls(layer.weight, layer.bias)


class Layer(NamedTuple):
    qkv: Weights
    output: Weights
    gate_up: Weights
    down: Weights
    mlp_norm: Tensor
    next_norm: Tensor
    """Of the next layer's attention, or the last norm."""
    q_norm: Tensor | None
    k_norm: Tensor | None
    window: int | None


class GPUDecoder:
    """A `StepModel` over the weights of `decoder`, which lie on the device already.

    A row's bits depend on the path its linear layers take, which follows from the number of tokens
    in the step: up to `kernels.gpu.skinny_config`'s limit one kernel, cuBLAS beyond it.
    """

    def __init__(self, decoder: Decoder, max_model_len: int) -> None:
        config = decoder.config
        self._eps = config.rms_norm_eps
        self._n_heads = config.n_heads
        self._scale = config.head_dim**-0.5
        self._embedding, self._head = decoder.embedding, decoder.head
        self._first_norm = _layers(decoder)[0].attention_norm.weight
        self._layers = _layer_weights(decoder)
        self._rotations = _rotations(decoder, max_model_len)

    def excerpt(self) -> GPUDecoder:
        """With one layer of each kind: it launches whatever the whole does, and is soon done."""
        part = copy(self)
        part._layers = list({layer.window: layer for layer in self._layers}.values())
        return part

    def forward(
        self, token_ids: Tensor, positions: Tensor, inputs: AttentionInputs, kv: KVCache
    ) -> Tensor:
        x, residual = embed_rms_norm(token_ids, self._embedding, self._first_norm, self._eps)
        for index, layer in enumerate(self._layers):
            q = self._queries(layer, x, positions, inputs, kv.k[index], kv.v[index])
            mixed = paged_attention(
                q, kv.k[index], kv.v[index], inputs, scale=self._scale, window=layer.window
            )
            attended = _linear(mixed.flatten(1), layer.output)
            x, residual = add_rms_norm(attended, residual, layer.mlp_norm, self._eps)
            x, residual = add_rms_norm(_mlp(x, layer), residual, layer.next_norm, self._eps)
        return x

    def _queries(
        self,
        layer: Layer,
        x: Tensor,
        positions: Tensor,
        inputs: AttentionInputs,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        """Rotated queries [T, Hq, D]; stores K and V."""
        return rope_store(
            _linear(x, layer.qkv),
            positions,
            self._rotations,
            inputs.slot_mapping,
            k,
            v,
            n_heads=self._n_heads,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=self._eps,
        )

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[R, vocab] of hidden states [R, H], in the model's dtype."""
        return skinny_linear(hidden, self._head, out=out)


def _linear(x: Tensor, weights: Weights) -> Tensor:
    """[T, N], or K-splits float32[S, T, N] where that is faster."""
    (tokens, k), n = x.shape, weights.w.shape[0]
    if weights.bias is None:
        config = choose_config(tokens, n, k, x.dtype, multiprocessors())
        if config is not None:
            return skinny_linear(x, weights.w, config=config)
    return linear(x, weights.w, weights.bias)


def _mlp(x: Tensor, layer: Layer) -> Tensor:
    return _linear(_gated(x, layer.gate_up), layer.down)


def _gated(x: Tensor, weights: Weights) -> Tensor:
    (tokens, k), n = x.shape, weights.w.shape[0]
    if weights.bias is None:
        config = choose_gated_config(tokens, n // 2, k, x.dtype, multiprocessors())
        if config is not None:
            return skinny_gate_up(x, weights.w, config=config)
    return silu_mul(linear(x, weights.w, weights.bias))


def _layers(decoder: Decoder) -> list[DecoderLayer]:
    return [layer for layer in decoder.layers if isinstance(layer, DecoderLayer)]


def _layer_weights(decoder: Decoder) -> list[Layer]:
    layers = _layers(decoder)
    norms = [layer.attention_norm.weight for layer in layers[1:]] + [decoder.norm.weight]
    return [_of(layer, norm) for layer, norm in zip(layers, norms, strict=True)]


def _of(layer: DecoderLayer, next_norm: Tensor) -> Layer:
    attention, mlp = layer.attention, layer.mlp
    return Layer(
        qkv=Weights.of(attention.qkv),
        output=Weights.of(attention.output),
        gate_up=Weights.of(mlp.gate_up),
        down=Weights.of(mlp.down),
        mlp_norm=layer.mlp_norm.weight,
        next_norm=next_norm,
        q_norm=None if attention.q_norm is None else attention.q_norm.weight,
        k_norm=None if attention.k_norm is None else attention.k_norm.weight,
        window=attention.window,
    )


def _rotations(decoder: Decoder, max_model_len: int) -> Tensor:
    """float32[max_model_len + 1, D]: cos then sin of every position. Worked out on the CPU, whose
    sine is exact for large angles too."""
    rotary = decoder.rotary
    positions = torch.arange(max_model_len + 1)
    both = rope_cos_sin(positions, rotary.inv_freq.cpu(), rotary.attention_factor)
    return torch.cat(both, dim=1).to(rotary.inv_freq.device)

"""Tiny random models of every family, saved with transformers into prepared folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pagemesh.shared.prepared import PreparedModel
from pagemesh.worker_svc.loader import load_decoder
from pagemesh.worker_svc.models.decoder import Decoder

VOCAB = 96
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
_SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
_PLAIN = {"rope_type": "default", "rope_theta": 500.0}


def _llama(**keys: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**(_SIZES | {"rope_parameters": dict(_PLAIN)} | keys)))


def _mistral(**keys: Any) -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**(_SIZES | {"rope_parameters": dict(_PLAIN)} | keys)))


def _qwen2(**keys: Any) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**(_SIZES | {"rope_parameters": dict(_PLAIN)} | keys)))


def _qwen3(**keys: Any) -> PreTrainedModel:
    sizes = _SIZES | {"head_dim": 24, "rope_parameters": dict(_PLAIN)}
    return Qwen3ForCausalLM(Qwen3Config(**(sizes | keys)))


MODELS = {
    "llama2": lambda: _llama(num_key_value_heads=4),
    "llama-tied": lambda: _llama(tie_word_embeddings=True),
    # Nothing fills a vector: an odd width, heads of 10, 9 query heads to a KV head.
    "llama-odd-sizes": lambda: _llama(
        hidden_size=63,
        intermediate_size=45,
        head_dim=10,
        num_attention_heads=9,
        num_key_value_heads=1,
        attention_bias=True,
        mlp_bias=True,
    ),
    "llama-biases": lambda: _llama(attention_bias=True, mlp_bias=True),
    "llama3-rope": lambda: _llama(rope_parameters=dict(_LLAMA3)),
    "llama-linear-rope": lambda: _llama(
        rope_parameters=_PLAIN | {"rope_type": "linear", "factor": 4.0}
    ),
    "llama-dynamic-rope": lambda: _llama(
        rope_parameters=_PLAIN | {"rope_type": "dynamic", "factor": 4.0}
    ),
    "mistral-window": lambda: _mistral(sliding_window=5, head_dim=24),
    "mistral-no-window": lambda: _mistral(sliding_window=None),
    "qwen2": lambda: _qwen2(),
    "qwen2-window": lambda: _qwen2(**_SLIDING),
    "qwen2-layer-types": lambda: _qwen2(
        **_SLIDING, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "qwen2-yarn": lambda: _qwen2(rope_parameters=dict(_YARN)),
    "qwen3": lambda: _qwen3(),
    "qwen3-tied-biases-window": lambda: _qwen3(
        tie_word_embeddings=True, attention_bias=True, **_SLIDING
    ),
}


def make_model(name: str) -> PreTrainedModel:
    """With every parameter random, norms and biases too, so that none can be forgotten unseen."""
    torch.manual_seed(sum(name.encode()))
    model = MODELS[name]().eval().requires_grad_(False)
    for key, parameter in model.named_parameters():
        parameter.normal_(1.0 if key.endswith("norm.weight") else 0.0, 0.15)
    return model


def prepared(
    folder: Path, weights_format: Literal["safetensors", "gguf", "dummy"] = "safetensors"
) -> PreparedModel:
    """The manifest of a folder as it stands."""
    config = json.loads((folder / "config.json").read_text())
    suffix = {"safetensors": "*.safetensors", "gguf": "*.gguf", "dummy": "*.none"}[weights_format]
    return PreparedModel(
        name="tiny",
        source=str(folder),
        architecture=config["architectures"][0],
        weights_format=weights_format,
        weights=sorted(path.name for path in folder.glob(suffix)),
        vocab_tokens=config["vocab_size"],
        max_position_tokens=config["max_position_embeddings"],
        bos_token_id=None,
        eos_token_ids=[],
        template_tokens={},
        fingerprint="",
        created_s=0,
    )


def load(
    folder: Path,
    weights_format: Literal["safetensors", "gguf", "dummy"] = "safetensors",
    dtype: torch.dtype = torch.float32,
) -> Decoder:
    return load_decoder(folder, prepared(folder, weights_format), dtype=dtype, device="cpu")


def same_weights(one: Decoder, other: Decoder) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)

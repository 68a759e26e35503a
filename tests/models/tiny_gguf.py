"""Writes a tiny model as llama.cpp's converter would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from transformers import PreTrainedModel

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    architecture: str,
    *,
    quantisation: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
) -> None:
    """Matrices in `quantisation`, vectors in F32; for llama with q and k interleaved."""
    writer = GGUFWriter(path, architecture)
    for key, value in (metadata or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(key, value)
    for name, parameter in model.named_parameters():
        data = parameter.numpy()
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            data = _interleave(data, model.config.head_dim)
        if data.ndim == 2 and quantisation is not GGMLQuantizationType.F32:
            data = quantize(data, quantisation)
            writer.add_tensor(_gguf_name(name), data, raw_dtype=quantisation)
        else:
            writer.add_tensor(_gguf_name(name), np.ascontiguousarray(data))
    for name, data in (extra_tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleave(data: np.ndarray, head_dim: int) -> np.ndarray:
    """Within each head, row i of the first half and row i of the second become neighbours."""
    halves = data.reshape(-1, 2, head_dim // 2, *data.shape[1:])
    return halves.swapaxes(1, 2).reshape(data.shape)


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest]}.{kind}"

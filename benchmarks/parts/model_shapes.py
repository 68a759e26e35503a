"""Folders of well-known model shapes without weights: a config.json, and a tokenizer in which every
id has a text of its own. For `--load-format dummy`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

Config = dict[str, Any]

_EOS: Final = "<|endoftext|>"
_QWEN3_06B: Final[Config] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": True,
    "vocab_size": 151_936,
}
_LLAMA31_8B: Final[Config] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131_072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128_256,
}
SHAPES: Final[Mapping[str, Config]] = {"qwen3-0.6b": _QWEN3_06B, "llama31-8b": _LLAMA31_8B}


def model_folder(model: str, parent: Path) -> Path:
    """The folder of a shape by its name, written in `parent` if it is not there; any other model
    is a folder already."""
    if model not in SHAPES:
        return Path(model)
    folder = parent / model
    write_shape(folder, SHAPES[model])
    return folder


def write_shape(folder: Path, config: Config) -> None:
    """`config` needs no ids of special tokens: the last id of its vocabulary ends an answer."""
    folder.mkdir(parents=True, exist_ok=True)
    end_id = config["vocab_size"] - 1
    files = {
        "config.json": {**config, "eos_token_id": end_id, "bos_token_id": end_id},
        "tokenizer.json": _tokenizer(end_id),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": _EOS,
            "bos_token": _EOS,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


def _tokenizer(end_id: int) -> Config:
    """Byte-level BPE without merges: prompts are bytes, answers are words."""
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": end_id,
                "content": _EOS,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": _vocabulary(end_id), "merges": []},
    }


def _vocabulary(n_tokens: int) -> dict[str, int]:
    """Byte-level BPE's 256 letters, then words with a space in front."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = [chr(byte) for byte in kept]
    letters += [chr(256 + index) for index in range(256 - len(letters))]
    words = [f"Ġ{index}" for index in range(n_tokens - len(letters))]
    return {token: token_id for token_id, token in enumerate([*letters, *words])}

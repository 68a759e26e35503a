"""Reading a GGUF file: its config in Hugging Face's terms, and the ids that end a turn.

The keys are those of the GGUF specification (ggml's docs/gguf.md). transformers reads configs from
GGUF files too, but drops head sizes, sliding windows and rope scaling, so the keys are read here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pagemesh.shared.errors import StartupError

# GGUF architecture -> (model_type, class).
_FAMILIES: Final = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
_SIZES: Final = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}
_END_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")


class GgufModel:
    """One opened GGUF file. Tensors stay on disk (memory-mapped)."""

    def __init__(self, file: Path) -> None:
        """Raises StartupError when the file is no GGUF, is truncated, or is part of a set."""
        from gguf import GGUFReader

        try:
            reader = GGUFReader(file)
        except (ValueError, IndexError, KeyError, OSError, OverflowError) as error:
            raise StartupError(
                f"{file} is no whole GGUF file (truncated or damaged): fetch it again"
            ) from error
        self.file = file
        self._fields = {key: field.contents() for key, field in reader.fields.items()}
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        if self._fields.get("split.count", 0) > 1:
            raise StartupError(
                f"{file} is one part of several: join them with llama-gguf-split --merge"
            )

    @property
    def architecture(self) -> str:
        return str(self._fields.get("general.architecture", "unknown"))

    def end_token_ids(self) -> list[int]:
        """The ids that the file says end an answer or a turn."""
        keys = (f"tokenizer.ggml.{name}" for name in _END_KEYS)
        return [int(self._fields[key]) for key in keys if key in self._fields]

    def config(self) -> dict[str, Any]:
        """The content of config.json. An unknown architecture yields its name alone.

        Raises StartupError when the file lacks a size or holds rope factors of an unknown kind.
        """
        family = _FAMILIES.get(self.architecture)
        if family is None or self._get("expert_count", 0) > 0:
            experts = "-moe" if family else ""
            return {"model_type": self.architecture + experts, "architectures": []}
        config: dict[str, Any] = {"model_type": family[0], "architectures": [family[1]]}
        config |= {
            name: self._get(key) for name, key in _SIZES.items() if self._get(key) is not None
        }
        if family[0] in ("llama", "mistral"):
            config |= self._window()
        return self._completed(config)

    def _window(self) -> dict[str, Any]:
        """Mistral is Llama with a sliding window, which its config must state or deny."""
        window = self._get("attention.sliding_window")
        if window is None and self.architecture == "llama":
            return {}
        model_type, class_name = _FAMILIES["mistral"]
        return {"model_type": model_type, "architectures": [class_name], "sliding_window": window}

    def _completed(self, config: dict[str, Any]) -> dict[str, Any]:
        """What the tensors say, and what the keys leave out when it is the usual thing."""
        try:
            config["vocab_size"] = int(self._tensors["token_embd.weight"].shape[1])
            usual_head = config["hidden_size"] // config["num_attention_heads"]
            config.setdefault("num_key_value_heads", config["num_attention_heads"])
        except KeyError as error:
            raise StartupError(f"{self.file} lacks {error}: it is no complete model") from error
        config.setdefault("head_dim", usual_head)
        config["hidden_act"] = "silu"
        config["tie_word_embeddings"] = "output.weight" not in self._tensors
        config["attention_bias"] = "blk.0.attn_q.bias" in self._tensors
        config["rope_theta"] = self._get("rope.freq_base", 10000.0)
        scaling = self._rope_scaling(config)
        if scaling is not None:
            config["rope_scaling"] = scaling
        return config

    def _rope_scaling(self, config: dict[str, Any]) -> dict[str, Any] | None:
        if "rope_freqs.weight" in self._tensors:
            factors = np.asarray(self._tensors["rope_freqs.weight"].data, dtype=np.float64)
            return llama3_scaling(factors, config["rope_theta"], str(self.file))
        kind = self._get("rope.scaling.type", "none")
        if kind == "none":
            return None
        scaling = {"rope_type": kind, "factor": self._get("rope.scaling.factor", 1.0)}
        original = self._get("rope.scaling.original_context_length")
        return scaling | ({"original_max_position_embeddings": original} if original else {})

    def _get(self, key: str, default: Any = None) -> Any:
        return self._fields.get(f"{self.architecture}.{key}", default)


def llama3_scaling(factors: NDArray[np.float64], theta: float, name: str) -> dict[str, Any]:
    """The Llama 3 rope parameters behind the divisors float[head_dim / 2] that a GGUF stores.

    Every Llama 3.x uses the same wave-length bounds; only the factor differs, and it is the largest
    divisor. Raises StartupError when the divisors are not those of these parameters.
    """
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if not np.allclose(factors, _llama3_divisors(len(factors), theta, scaling), rtol=1e-3):
        raise StartupError(f"{name} scales its rope in a way that is not supported (rope_freqs)")
    return scaling


def _llama3_divisors(count: int, theta: float, scaling: dict[str, Any]) -> NDArray[np.float64]:
    """Llama 3.1's rule: long waves are divided by the factor, short ones not, blended between."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wave_tokens = 2 * np.pi * theta ** (np.arange(count) / count)
    rotations = scaling["original_max_position_embeddings"] / wave_tokens
    blend = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    divisors: NDArray[np.float64] = 1.0 / ((1 - blend) / scaling["factor"] + blend)
    return divisors

"""Reading a GGUF file: its config in Hugging Face's terms, and the ids that end a turn.

The keys are those of the GGUF specification (ggml's docs/gguf.md). transformers reads configs from
GGUF files too, but drops head sizes, sliding windows and rope scaling, so the keys are read here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from pagemesh.shared.errors import StartupError

# GGUF architecture -> (model_type, class).
_FAMILIES: Final = {
    "llama": ("llama", "LlamaForCausalLM"),
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
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        if self._field("split.count", 1) > 1:
            raise StartupError(
                f"{file} is one part of several: join them with llama-gguf-split --merge"
            )

    @property
    def architecture(self) -> str:
        return str(self._field("general.architecture", "unknown"))

    def end_token_ids(self) -> list[int]:
        """The ids that the file says end an answer or a turn."""
        found = (self._field(f"tokenizer.ggml.{name}", None) for name in _END_KEYS)
        return [int(token_id) for token_id in found if token_id is not None]

    def config(self) -> dict[str, Any]:
        """The content of config.json. An unknown architecture yields its name alone.

        Raises StartupError when the file lacks a size.
        """
        family = _FAMILIES.get(self.architecture)
        if family is None or self._get("expert_count", 0) > 0:
            experts = "-moe" if family else ""
            return {"model_type": self.architecture + experts, "architectures": []}
        config: dict[str, Any] = {"model_type": family[0], "architectures": [family[1]]}
        config |= {
            name: self._get(key) for name, key in _SIZES.items() if self._get(key) is not None
        }
        return self._completed(config)

    def _completed(self, config: dict[str, Any]) -> dict[str, Any]:
        """What the tensors say, and what the keys leave out when it is the usual thing."""
        try:
            config["vocab_size"] = int(self._tensors["token_embd.weight"].shape[1])
            usual_head = config["hidden_size"] // config["num_attention_heads"]
            config.setdefault("num_key_value_heads", config["num_attention_heads"])
        except KeyError as error:
            raise StartupError(f"{self.file} lacks {error}: it is no complete model") from error
        config.setdefault("head_dim", usual_head)
        window = self._get("attention.sliding_window")
        if window and self.architecture == "llama":
            # Mistral is Llama with a window, and its files call themselves llama.
            config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
            config["sliding_window"] = window
        config["hidden_act"] = "silu"
        config["tie_word_embeddings"] = "output.weight" not in self._tensors
        config["attention_bias"] = "blk.0.attn_q.bias" in self._tensors
        config["rope_theta"] = self._get("rope.freq_base", 10000.0)
        config["rope_scaling"] = self._rope_scaling()
        return config

    def _rope_scaling(self) -> dict[str, Any]:
        """Empty for plain rope, and for Llama 3, whose divisors are a tensor."""
        kind = self._get("rope.scaling.type", "none")
        if kind == "none":
            return {}
        scaling = {"rope_type": kind, "factor": self._get("rope.scaling.factor", 1.0)}
        original = self._get("rope.scaling.original_context_length")
        return scaling | ({"original_max_position_embeddings": original} if original else {})

    def _get(self, key: str, default: Any = None) -> Any:
        return self._field(f"{self.architecture}.{key}", default)

    def _field(self, key: str, default: Any) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

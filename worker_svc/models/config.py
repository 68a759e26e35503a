"""The decoder's configuration, read from a Hugging Face config.json.

Every key that changes the mathematics is either honoured or refused: a model that loads gives the
logits its authors meant.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pagemesh.shared.errors import StartupError
from pagemesh.worker_svc.models.rope_config import RopeConfig, read_rope

_Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A Llama-family decoder. `windows[layer]` is its sliding window in tokens, or None."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_position_tokens: int
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool

    @classmethod
    def from_folder(cls, folder: Path) -> DecoderConfig:
        """Read folder/config.json. Raises StartupError when it cannot be served."""
        path = folder / "config.json"
        try:
            raw = json.loads(path.read_bytes())
        except OSError as error:
            raise StartupError(f"{path} cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise StartupError(f"{path} is not valid JSON ({error})") from error
        if not isinstance(raw, dict):
            raise StartupError(f"{path} is not a JSON object")
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: _Raw) -> DecoderConfig:
        """`raw` is the content of config.json. Raises StartupError."""
        architecture, family = _family(raw)
        _refuse_foreign_maths(raw)
        n_heads = _count(raw, "num_attention_heads")
        hidden_size = _count(raw, "hidden_size")
        head_dim = _count(raw, "head_dim", family.head_dim or hidden_size // n_heads)
        config = cls(
            architecture=architecture,
            vocab_size=_count(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_count(raw, "intermediate_size"),
            n_layers=_count(raw, "num_hidden_layers"),
            n_heads=n_heads,
            n_kv_heads=_count(raw, "num_key_value_heads", n_heads),
            head_dim=head_dim,
            max_position_tokens=_count(raw, "max_position_embeddings"),
            rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
            rope=read_rope(raw),
            windows=family.windows(raw),
            qkv_bias=family.qkv_bias(raw),
            output_bias=family.output_bias(raw),
            mlp_bias=family.mlp_bias(raw),
            qk_norm=family.qk_norm,
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        )
        config._check()
        return config

    def _check(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise StartupError(
                f"config.json: num_attention_heads ({self.n_heads}) is not a multiple of "
                f"num_key_value_heads ({self.n_kv_heads})"
            )
        if self.head_dim % 2:
            raise StartupError(f"config.json: head_dim ({self.head_dim}) is odd")


# -- families -------------------------------------------------------------------------------------


def _never(_: _Raw) -> bool:
    return False


def _always(_: _Raw) -> bool:
    return True


def _flag(key: str) -> Callable[[_Raw], bool]:
    return lambda raw: bool(raw.get(key, False))


def _no_windows(raw: _Raw) -> tuple[int | None, ...]:
    if raw.get("sliding_window") is not None:
        raise _unsupported("sliding_window", raw["sliding_window"])
    return _checked_layer_types(raw, (None,) * _count(raw, "num_hidden_layers"))


def _one_window(raw: _Raw) -> tuple[int | None, ...]:
    """Mistral: the same window, or none, in every layer."""
    window = (
        None if raw.get("sliding_window", 4096) is None else _count(raw, "sliding_window", 4096)
    )
    return _checked_layer_types(raw, (window,) * _count(raw, "num_hidden_layers"))


def _qwen_windows(raw: _Raw) -> tuple[int | None, ...]:
    """Qwen: a window from layer max_window_layers on, or where layer_types says so."""
    n_layers = _count(raw, "num_hidden_layers")
    if not raw.get("use_sliding_window", False) or raw.get("sliding_window", 4096) is None:
        return _checked_layer_types(raw, (None,) * n_layers)
    window = _count(raw, "sliding_window", 4096)
    full_layers = _count(raw, "max_window_layers", 28, least=0)
    types = raw.get("layer_types")
    if types is None:
        return tuple(window if layer >= full_layers else None for layer in range(n_layers))
    windows = tuple(window if kind == "sliding_attention" else None for kind in types)
    return _checked_layer_types(raw, windows)


def _checked_layer_types(raw: _Raw, windows: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """`windows`, unless the config's layer_types describe other layers."""
    ours = ["full_attention" if window is None else "sliding_attention" for window in windows]
    types = raw.get("layer_types")
    if types is not None and (types != ours or len(ours) != _count(raw, "num_hidden_layers")):
        raise _unsupported("layer_types", types)
    return windows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """How one architecture of transformers differs from plain Llama 2."""

    windows: Callable[[_Raw], tuple[int | None, ...]] = _no_windows
    qkv_bias: Callable[[_Raw], bool] = _never
    output_bias: Callable[[_Raw], bool] = _never
    mlp_bias: Callable[[_Raw], bool] = _never
    qk_norm: bool = False
    head_dim: int | None = None


_FAMILIES: Final[dict[str, _Family]] = {
    "LlamaForCausalLM": _Family(
        qkv_bias=_flag("attention_bias"),
        output_bias=_flag("attention_bias"),
        mlp_bias=_flag("mlp_bias"),
    ),
    "MistralForCausalLM": _Family(windows=_one_window),
    "Qwen2ForCausalLM": _Family(windows=_qwen_windows, qkv_bias=_always),
    "Qwen3ForCausalLM": _Family(
        windows=_qwen_windows,
        qkv_bias=_flag("attention_bias"),
        output_bias=_flag("attention_bias"),
        qk_norm=True,
        head_dim=128,
    ),
}


def _family(raw: _Raw) -> tuple[str, _Family]:
    named = raw.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else named
    if isinstance(architecture, str) and architecture in _FAMILIES:
        return architecture, _FAMILIES[architecture]
    raise StartupError(
        f"the architecture {architecture or raw.get('model_type', 'unknown')} is not supported; "
        f"supported are {', '.join(_FAMILIES)}"
    )


# -- what is refused ------------------------------------------------------------------------------

# Keys of related architectures that change the mathematics, with the values that do not.
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "hidden_act": ("silu",),
    "is_encoder_decoder": (False,),
    "auto_map": (),
    "quantization_config": (),
    "compression_config": (),
    "partial_rotary_factor": (1, 1.0),
    "no_rope_layers": (),
    "no_rope_layer_interval": (),
    "attention_chunk_size": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "clip_qkv": (),
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "attention_multiplier": (),
    "residual_multiplier": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "scale_emb": (1, 1.0),
    "scale_depth": (),
    "dim_model_base": (),
    "query_pre_attn_scalar": (),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "use_parallel_residual": (False,),
    "num_experts": (0,),
    "num_local_experts": (0, 1),
    "n_routed_experts": (0,),
    "tie_encoder_decoder": (False,),
}


def _refuse_foreign_maths(raw: _Raw) -> None:
    for key, neutral in _NEUTRAL.items():
        value = raw.get(key)
        if value is not None and value not in neutral:
            raise _unsupported(key, value)


def _unsupported(key: str, value: Any) -> StartupError:
    shown = json.dumps(value, default=str)
    return StartupError(
        f"config.json: {key} = {shown[:80]} is not supported for this architecture, and ignoring "
        "it would change the model's answers"
    )


def _number(raw: _Raw, key: str, default: float) -> float:
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise StartupError(f"config.json: {key} must be a number")
    return float(value)


def _count(raw: _Raw, key: str, default: int | None = None, *, least: int = 1) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise StartupError(f"config.json: {key} must be a whole number of at least {least}")
    return value

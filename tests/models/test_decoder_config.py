"""config.json: what is honoured, in both spellings, and what is refused."""

from __future__ import annotations

import json

import pytest

from pagemesh.shared.errors import StartupError
from pagemesh.worker_svc.models.config import DecoderConfig
from pagemesh.worker_svc.models.rope_config import RopeConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"]}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"]}


def read(base, **keys):
    return DecoderConfig.from_dict(base | keys)


def test_llama_2_defaults():
    config = read(LLAMA)
    assert (config.n_kv_heads, config.head_dim) == (4, 16)
    assert config.windows == (None,) * 4
    assert not any((config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm))
    assert config.rope.theta == 10000.0


def test_old_and_new_rope_spelling_are_the_same():
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    old = read(LLAMA, rope_theta=5e5, rope_scaling=llama3 | {"type": "llama3"})
    new = read(
        LLAMA, rope_theta=None, rope_parameters=llama3 | {"rope_type": "llama3", "rope_theta": 5e5}
    )
    assert old == new
    assert old.rope == RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_tokens=32)


def test_mistral_has_one_window_or_none():
    assert read(MISTRAL, sliding_window=32).windows == (32,) * 4
    assert read(MISTRAL, sliding_window=None).windows == (None,) * 4
    assert read(MISTRAL).windows == (4096,) * 4


def test_qwen_windows_begin_after_the_full_layers():
    sliding = {"sliding_window": 32, "max_window_layers": 3}
    assert read(QWEN2, use_sliding_window=False, **sliding).windows == (None,) * 4
    assert read(QWEN2, use_sliding_window=True, **sliding).windows == (None, None, None, 32)


def test_dynamic_rope_is_plain_within_the_models_length():
    """Its scaling starts past max_position_embeddings, which no sequence passes."""
    rope = read(LLAMA, rope_scaling={"type": "dynamic", "factor": 2.0}).rope
    assert rope.kind == "dynamic"


@pytest.mark.parametrize(
    "name",
    [
        "GemmaForCausalLM",
        "MixtralForCausalLM",
        "T5ForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "JambaForCausalLM",
        "SmolLM3ForCausalLM",
    ],
)
def test_unsupported_architecture_is_one_sentence_with_the_supported_ones(name):
    with pytest.raises(StartupError) as caught:
        read(LLAMA, architectures=[name])
    assert str(caught.value) == (
        f"the architecture {name} is not supported; supported are LlamaForCausalLM, "
        "MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"
    )


@pytest.mark.parametrize(
    ("base", "keys"),
    [
        (LLAMA, {"hidden_act": "gelu"}),
        (LLAMA, {"no_rope_layers": [1, 1, 1, 0]}),
        (LLAMA, {"sliding_window": 32}),
        (LLAMA, {"quantization_config": {"quant_method": "gptq"}}),
        (LLAMA, {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}),
        (LLAMA, {"partial_rotary_factor": 0.5}),
        (LLAMA, {"logits_scaling": 8.0}),
        (LLAMA, {"layer_types": ["full_attention"] * 3 + ["linear_attention"]}),
        (LLAMA, {"layer_types": ["full_attention"] * 3}),
        (MISTRAL, {"layer_types": ["full_attention"] * 4}),
        (QWEN2, {"use_sliding_window": True, "layer_types": ["full_attention"] * 3 + ["mamba"]}),
        (QWEN2, {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 4}),
    ],
)
def test_maths_that_would_be_ignored_is_refused(base, keys):
    with pytest.raises(StartupError, match=rf"{list(keys)[-1]} = .* not supported"):
        read(base, **keys)


@pytest.mark.parametrize(
    ("rope", "word"),
    [
        ({"type": "longrope", "factor": 2.0}, "'longrope' is not supported"),
        ({"type": "llama3", "factor": 2.0}, "needs high_freq_factor"),
        ({"type": "linear"}, "needs factor"),
        ({"type": "linear", "factor": 2.0, "mscale": 2.0}, "mscale is not supported"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention is not supported"),
        ({"type": "linear", "factor": "big"}, "make no sense"),
        ({"type": ["linear"]}, "rope type"),
    ],
)
def test_rope_that_is_not_implemented_is_refused(rope, word):
    with pytest.raises(StartupError, match=word):
        read(LLAMA, rope_scaling=rope)


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps"),
        ({"rope_theta": "x"}, "rope"),
        ({"rope_theta": 0}, "rope"),
        ({"rope_scaling": "linear"}, "rope"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope"),
        ({"layer_types": 3}, "layer_types"),
        ({"architectures": []}, "architecture llama is not supported"),
        ({"architectures": 3}, "architecture 3 is not supported"),
    ],
)
def test_impossible_values_are_refused_by_name(keys, word):
    with pytest.raises(StartupError, match=word):
        read(LLAMA, **keys)


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_damaged_config_names_the_file(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(StartupError, match=r"config\.json"):
        DecoderConfig.from_folder(tmp_path)


def test_missing_config_names_the_file(tmp_path):
    with pytest.raises(StartupError, match=r"config\.json cannot be read"):
        DecoderConfig.from_folder(tmp_path)


def test_from_folder_reads_the_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert DecoderConfig.from_folder(tmp_path) == read(LLAMA)

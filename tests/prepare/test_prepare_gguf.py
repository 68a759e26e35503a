"""GGUF files: what becomes config.json, tokenizer and manifest, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from prepare_helpers import Options
from tiny_llama import TEMPLATE
from tokenizers import Tokenizer

from pagemesh.prepare import prepare
from pagemesh.shared.errors import StartupError
from pagemesh.shared.prepared import load_prepared

CONTROL, NORMAL = 3, 1

WriteGguf = Callable[..., Path]


@pytest.fixture
def write_gguf(tiny_source: Path, tmp_path: Path) -> WriteGguf:
    """Write a .gguf file with the tiny model's tokenizer; keyword arguments are GGUFWriter's."""

    def write(
        name: str = "tiny.gguf",
        *,
        architecture: str = "llama",
        tensors: tuple[str, ...] = (),
        **keys: Any,
    ) -> Path:
        model = json.loads((tiny_source / "tokenizer.json").read_text())["model"]
        tokens = sorted(model["vocab"], key=model["vocab"].get)
        path = tmp_path / name
        writer = GGUFWriter(path, architecture)
        writer.add_block_count(2)
        writer.add_context_length(96)
        writer.add_embedding_length(32)
        writer.add_feed_forward_length(64)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        writer.add_token_types([CONTROL] * 2 + [NORMAL] * (len(tokens) - 2))
        writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_chat_template(TEMPLATE)
        for key, value in keys.items():
            arguments = value if isinstance(value, tuple) else (value,)
            getattr(writer, f"add_{key}")(*arguments)
        for tensor in ("token_embd.weight", "blk.0.attn_q.weight", *tensors):
            writer.add_tensor(tensor, np.ones((320, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def test_gguf_is_prepared_whole(write_gguf: WriteGguf, options: Options) -> None:
    file = write_gguf(eot_token_id=5)
    folder = prepare(options(file))
    prepared = load_prepared(folder)
    assert (prepared.name, prepared.architecture) == ("tiny", "LlamaForCausalLM")
    assert (prepared.weights_format, prepared.weights) == ("gguf", ["tiny.gguf"])
    assert (prepared.vocab_tokens, prepared.max_position_tokens) == (320, 96)
    assert (prepared.bos_token_id, prepared.eos_token_ids) == (0, [1, 5])
    assert (folder / "tiny.gguf").resolve() == file
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("<s>the page 日").ids
    assert ids[0] == 0
    assert tokenizer.decode(ids) == "the page 日"


def test_folder_of_one_gguf_means_that_file(write_gguf: WriteGguf, options: Options) -> None:
    file = write_gguf()
    assert load_prepared(prepare(options(file.parent))).name == "tiny"
    write_gguf("other.gguf")
    with pytest.raises(StartupError, match=r"several .gguf files \(other.gguf, tiny.gguf\)"):
        prepare(options(file.parent))


@pytest.mark.parametrize(
    ("architecture", "tensors", "keys", "expected"),
    [
        ("llama", (), {}, {"model_type": "llama", "head_dim": 8, "tie_word_embeddings": True}),
        ("llama", ("output.weight",), {}, {"tie_word_embeddings": False}),
        ("llama", ("blk.0.attn_q.bias",), {}, {"attention_bias": True}),
        (
            "llama",
            (),
            {"rope_freq_base": 5e5, "key_length": 16},
            {"rope_theta": 5e5, "head_dim": 16},
        ),
        ("llama", (), {"sliding_window": 64}, {"model_type": "mistral", "sliding_window": 64}),
        ("qwen2", (), {}, {"architectures": ["Qwen2ForCausalLM"]}),
        ("qwen3", (), {"key_length": 16}, {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16}),
    ],
)
def test_config_says_what_the_file_says(
    write_gguf: WriteGguf,
    options: Options,
    architecture: str,
    tensors: tuple[str, ...],
    keys: dict[str, Any],
    expected: dict[str, Any],
) -> None:
    file = write_gguf(architecture=architecture, tensors=tensors, **keys)
    config = _config(prepare(options(file)))
    assert {key: config[key] for key in expected} == expected


def test_rope_scaling_is_kept(write_gguf: WriteGguf, options: Options) -> None:
    from gguf import RopeScalingType

    file = write_gguf(
        rope_scaling_type=RopeScalingType.YARN,
        rope_scaling_factor=4.0,
        rope_scaling_orig_ctx_len=24,
    )
    assert _config(prepare(options(file)))["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 24,
    }


def test_dummy_links_no_weights(write_gguf: WriteGguf, options: Options) -> None:
    prepared = load_prepared(prepare(options(write_gguf(), load_format="dummy")))
    assert (prepared.weights_format, prepared.weights) == ("dummy", [])


@pytest.mark.parametrize(
    ("architecture", "keys"), [("mamba", {}), ("gemma3", {}), ("llama", {"expert_count": 8})]
)
def test_unsupported_architecture_is_refused(
    write_gguf: WriteGguf, options: Options, architecture: str, keys: dict[str, Any]
) -> None:
    file = write_gguf(architecture=architecture, **keys)
    with pytest.raises(StartupError, match=f"{architecture}.* is not supported; supported are"):
        prepare(options(file))


@pytest.mark.parametrize("kept", [0, 3, 40, 2000, 0.5, 0.999])
def test_truncated_file_is_refused(write_gguf: WriteGguf, options: Options, kept: float) -> None:
    file = write_gguf()
    data = file.read_bytes()
    file.write_bytes(data[: kept if isinstance(kept, int) else int(len(data) * kept)])
    with pytest.raises(StartupError, match=r"tiny.gguf is no whole GGUF file"):
        prepare(options(file))


def test_file_that_is_no_gguf_is_refused(tmp_path: Path, options: Options) -> None:
    file = tmp_path / "fake.gguf"
    file.write_bytes(b"not a model" * 1000)
    with pytest.raises(StartupError, match=r"fake.gguf is no whole GGUF file"):
        prepare(options(file))


def test_part_of_a_split_file_is_refused(write_gguf: WriteGguf, options: Options) -> None:
    file = write_gguf(uint16=("split.count", 2))
    with pytest.raises(StartupError, match="join them with llama-gguf-split --merge"):
        prepare(options(file))

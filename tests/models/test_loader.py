"""Weights from every kind of file, and what is said about files that cannot be used."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from safetensors.torch import load_file, save_file
from tiny_gguf import write_gguf
from tiny_models import load, make_model, prepared, same_weights

from pagemesh.shared.errors import StartupError
from pagemesh.worker_svc import checkpoint, gguf_weights
from pagemesh.worker_svc.loader import load_decoder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """name -> (transformers model, its folder, our decoder of it); each made once."""
    made = {}

    def make(name):
        if name not in made:
            model = make_model(name)
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            made[name] = (model, folder, load(folder))
        return made[name]

    return make


@pytest.fixture
def llama(saved, tmp_path):
    """A folder of its own with a tiny Llama in safetensors."""
    _, folder, _ = saved("llama2")
    return shutil.copytree(folder, tmp_path / "llama")


def gguf_folder(tmp_path, model, architecture, **options):
    folder = tmp_path / "gguf"
    folder.mkdir()
    model.config.save_pretrained(folder)
    write_gguf(model, folder / "model.gguf", architecture, **options)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_sharded_safetensors_equal_the_single_file(saved, tmp_path):
    model, _, whole = saved("llama2")
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert same_weights(load(tmp_path), whole)


@pytest.mark.parametrize("weights_format", ["safetensors", "gguf"])
def test_tensors_read_in_many_parts_are_the_same(saved, tmp_path, monkeypatch, weights_format):
    model, folder, whole = saved("llama2")
    if weights_format == "gguf":
        folder = gguf_folder(tmp_path, model, "llama")
    monkeypatch.setattr(checkpoint, "_PART_BYTES", 700)
    monkeypatch.setattr(gguf_weights, "_CHUNK_ELEMENTS", 700)
    assert same_weights(load(folder, weights_format), whole)


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("llama2", "llama"),
        ("llama-tied", "llama"),
        ("llama-biases", "llama"),
        ("mistral-no-window", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
    ],
)
def test_gguf_equals_its_safetensors_twin(saved, tmp_path, name, architecture):
    model, _, twin = saved(name)
    folder = gguf_folder(tmp_path, model, architecture)
    assert same_weights(load(folder, "gguf"), twin)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_quantised_gguf_is_dequantised(saved, tmp_path, kind):
    model, _, _ = saved("llama2")
    quantisation = GGMLQuantizationType[kind]
    folder = gguf_folder(tmp_path, model, "llama", quantisation=quantisation)
    got = load(folder, "gguf")
    expected = model.model.layers[1].self_attn.q_proj.weight.numpy()
    expected = dequantize(quantize(expected, quantisation), quantisation)
    assert np.array_equal(got.layers[1].attention.qkv.weight[: len(expected)].numpy(), expected)


def test_gguf_rope_factors_are_llama3_scaling(saved, tmp_path):
    """llama.cpp keeps Llama 3's scaling as divisors beside the weights, not as metadata."""
    model, _, scaled = saved("llama3-rope")
    _, _, plain = saved("llama2")
    factors = (plain.rotary.inv_freq / scaled.rotary.inv_freq).numpy()
    assert factors.max() > 7
    folder = gguf_folder(tmp_path, model, "llama", extra_tensors={"rope_freqs.weight": factors})
    assert torch.equal(load(folder, "gguf").rotary.inv_freq, scaled.rotary.inv_freq)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    (folder / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(load(folder, "gguf").rotary.inv_freq, scaled.rotary.inv_freq)


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type"),
        ({"llama.attention.sliding_window": 5}, "sliding_window"),
        ({"llama.attention.key_length": 32}, "key_length"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"split.count": 2}, "--merge"),
    ],
)
def test_gguf_that_contradicts_the_config_is_refused(saved, tmp_path, metadata, word):
    model, _, _ = saved("llama2")
    folder = gguf_folder(tmp_path, model, "llama", metadata=metadata)
    with pytest.raises(StartupError, match=word):
        load(folder, "gguf")


def test_gguf_of_another_architecture_is_refused(saved, tmp_path):
    model, _, _ = saved("llama2")
    with pytest.raises(StartupError, match=r"gemma3 is not supported; supported are llama, qwen2"):
        load(gguf_folder(tmp_path, model, "gemma3"), "gguf")


def test_dummy_weights_are_the_same_in_every_run(llama):
    one, other = load(llama, "dummy"), load(llama, "dummy")
    assert same_weights(one, other)
    assert 0.01 < one.layers[0].mlp.down.weight.std() < 0.03
    assert (one.norm.weight == 1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_converted_to_the_wanted_dtype(saved, dtype):
    _, folder, wide = saved("llama2")
    narrow = load(folder, dtype=dtype)
    assert {p.dtype for p in narrow.parameters()} == {dtype}
    assert torch.equal(narrow.head, wide.head.to(dtype))


def test_tied_checkpoint_may_repeat_the_head(saved, tmp_path):
    _, folder, decoder = saved("llama-tied")
    shutil.copytree(folder, tmp_path / "copy")
    file = tmp_path / "copy" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, file)
    assert same_weights(load(tmp_path / "copy"), decoder)


def edit(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_missing_tensors_are_named(llama):
    edit(llama, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.2" in name])
    with pytest.raises(StartupError, match=r"lacks model\.layers\.2\.\S+ and 8 more.*fetch"):
        load(llama)


def test_wrong_shape_names_both(llama):
    edit(llama, lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)}))
    with pytest.raises(StartupError, match=r"model\.norm\.weight has shape \[7\].*\[64\]"):
        load(llama)


def test_tensor_without_a_place_is_refused(llama):
    name = "model.layers.0.self_attn.q_norm.weight"
    edit(llama, lambda tensors: tensors.update({name: torch.ones(16)}))
    with pytest.raises(StartupError, match=r"safetensors: model\.layers\.0\.self_attn\.q_norm"):
        load(llama)


def test_quantised_safetensors_are_refused(llama):
    name = "model.layers.0.mlp.up_proj.weight"
    edit(llama, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(StartupError, match=r"up_proj.weight is stored as I8"):
        load(llama)


def test_missing_weights_file(llama):
    manifest = prepared(llama)
    (llama / "model.safetensors").unlink()
    with pytest.raises(StartupError, match=r"model\.safetensors is missing"):
        load_decoder(llama, manifest, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("kept", [0.0, 0.00001, 0.001, 0.5, 0.999])
def test_truncated_safetensors(llama, kept):
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * kept)])
    with pytest.raises(StartupError, match=r"model\.safetensors cannot be read.*truncated"):
        load(llama)


@pytest.mark.parametrize("kept", [0.0, 0.00001, 0.0001, 0.001, 0.01, 0.5, 0.999])
def test_truncated_gguf(saved, tmp_path, kept):
    model, _, _ = saved("llama2")
    folder = gguf_folder(tmp_path, model, "llama")
    file = folder / "model.gguf"
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * kept)])
    with pytest.raises(StartupError, match=r"model\.gguf cannot be read.*truncated"):
        load(folder, "gguf")


def test_not_a_gguf_at_all(saved, tmp_path):
    model, _, _ = saved("llama2")
    folder = gguf_folder(tmp_path, model, "llama")
    (folder / "model.gguf").write_text("<html>404 not found</html>" * 40)
    with pytest.raises(StartupError, match=r"model\.gguf cannot be read"):
        load(folder, "gguf")

"""Model folders: what is written, what is refused, when it is written again."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from prepare_helpers import Options, RunPython
from tiny_llama import TEMPLATE, TOKENIZER_TOKENS
from tokenizers import Tokenizer

from pagemesh.prepare import prepare
from pagemesh.shared.errors import StartupError
from pagemesh.shared.prepared import load_prepared
from pagemesh.shared.settings import ModelSettings


def _edit_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _shard(folder: Path) -> list[Path]:
    """Rewrite the weights of `folder` as several files with an index."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="40KB")
    return sorted(folder.glob("model-*.safetensors"))


def test_folder_is_prepared_whole(source: Path, options: Options) -> None:
    folder = prepare(options(source))
    prepared = load_prepared(folder)
    assert prepared.name == "tiny-llama"
    assert prepared.architecture == "LlamaForCausalLM"
    assert (prepared.weights_format, prepared.weights) == ("safetensors", ["model.safetensors"])
    assert (prepared.vocab_tokens, prepared.max_position_tokens) == (320, 128)
    assert (prepared.bos_token_id, prepared.eos_token_ids) == (0, [1])
    assert prepared.template_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    assert (folder / "model.safetensors").resolve() == source / "model.safetensors"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode("the page 日").ids) == "the page 日"


def test_every_source_of_end_ids_counts(source: Path, options: Options) -> None:
    _edit_json(source / "config.json", eos_token_id=[7, 5])
    _edit_json(source / "generation_config.json", eos_token_id=9)
    assert load_prepared(prepare(options(source))).eos_token_ids == [1, 5, 7, 9]


def test_sharded_weights_are_linked_by_the_index(source: Path, options: Options) -> None:
    shards = _shard(source)
    (source / "consolidated.safetensors").write_bytes(b"another copy")
    assert len(shards) > 1
    assert load_prepared(prepare(options(source))).weights == [file.name for file in shards]


def test_second_call_loads_neither_torch_nor_transformers(
    source: Path, options: Options, run_python: RunPython
) -> None:
    settings = options(source)
    folder = prepare(settings)
    before = (folder / "pagemesh.json").stat().st_ino
    done = run_python(
        "import sys\n"
        "from pagemesh.prepare import prepare\n"
        "from pagemesh.shared.settings import ModelSettings\n"
        f"model = ModelSettings(model={settings.model!r}, cache_dir={settings.cache_dir!r})\n"
        "print(prepare(model))\n"
        "print(sorted({'torch', 'transformers', 'tokenizers', 'gguf'} & set(sys.modules)))\n"
    )
    assert done.stdout.split("\n")[:2] == [str(folder), "[]"], done.stderr
    assert (folder / "pagemesh.json").stat().st_ino == before


def test_changed_source_is_prepared_again(source: Path, options: Options) -> None:
    first = load_prepared(prepare(options(source)))
    _edit_json(source / "generation_config.json", eos_token_id=42)
    second = load_prepared(prepare(options(source)))
    assert second.eos_token_ids == [1, 42]
    assert second.fingerprint != first.fingerprint


def test_other_weights_of_the_same_shape_have_another_fingerprint(
    source: Path, options: Options
) -> None:
    first = load_prepared(prepare(options(source))).fingerprint
    weights = bytearray((source / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (source / "model.safetensors").write_bytes(weights)
    assert load_prepared(prepare(options(source))).fingerprint != first


def test_fingerprint_does_not_depend_on_the_place(
    source: Path, tiny_source: Path, options: Options
) -> None:
    here, there = (load_prepared(prepare(options(path))) for path in (source, tiny_source))
    assert here.fingerprint == there.fingerprint


def test_prepared_folder_is_its_own_preparation(source: Path, options: Options) -> None:
    folder = prepare(options(source))
    assert prepare(options(folder)) == folder
    (source / "model.safetensors").unlink()
    with pytest.raises(StartupError, match="links to weights that are gone"):
        prepare(options(folder))


def test_processes_that_prepare_at_once_agree(source: Path, options: Options) -> None:
    settings = options(source)
    with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
        manifests = {load_prepared(path).created_s for path in pool.map(prepare, [settings] * 3)}
    assert len(manifests) == 1
    (folder,) = (path for path in Path(settings.cache_dir, "prepared").iterdir() if path.is_dir())
    assert load_prepared(folder).weights == ["model.safetensors"]


def test_dummy_needs_no_weights(source: Path, options: Options) -> None:
    (source / "model.safetensors").unlink()
    prepared = load_prepared(prepare(options(source, load_format="dummy")))
    assert (prepared.weights_format, prepared.weights) == ("dummy", [])


# -- options --------------------------------------------------------------------------------------


def test_chat_template_from_a_file_and_from_the_text(
    source: Path, options: Options, tmp_path: Path
) -> None:
    file = tmp_path / "other.jinja"
    file.write_text("from the file")
    folder = prepare(options(source, chat_template=str(file)))
    assert (folder / "chat_template.jinja").read_text() == "from the file"
    file.write_text("changed")
    assert prepare(options(source, chat_template=str(file))) == folder
    assert (folder / "chat_template.jinja").read_text() == "changed"
    literal = "{{ messages[0]['content'] }}"
    folder = prepare(options(source, chat_template=literal))
    assert (folder / "chat_template.jinja").read_text() == literal


def test_named_templates_give_the_default_one(source: Path, options: Options) -> None:
    (source / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": "plain"}, {"name": "tools", "template": "tools"}]
    _edit_json(source / "tokenizer_config.json", chat_template=named)
    folder = prepare(options(source))
    assert (folder / "chat_template.jinja").read_text() == "plain"


def test_model_without_template_has_none(source: Path, options: Options) -> None:
    (source / "chat_template.jinja").unlink()
    assert not (prepare(options(source)) / "chat_template.jinja").exists()


def test_tokenizer_of_another_folder(source: Path, tiny_source: Path, options: Options) -> None:
    for file in source.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(StartupError, match="no tokenizer that can be read"):
        prepare(options(source))
    folder = prepare(options(source, tokenizer=str(tiny_source)))
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() == TOKENIZER_TOKENS


def test_sentencepiece_tokenizer_is_converted(source: Path, options: Options) -> None:
    for file in source.glob("tokenizer*"):
        file.unlink()
    data = Path(__file__).parent / "data" / "tokenizer.model"
    (source / "tokenizer.model").write_bytes(data.read_bytes())
    _edit_json(source / "config.json", vocab_size=600)
    folder = prepare(options(source))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("the gateway 日", add_special_tokens=False).ids
    assert tokenizer.decode(ids) == "the gateway 日"


def test_code_in_a_tokenizer_runs_only_with_trust(source: Path, options: Options) -> None:
    (source / "mine.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n"
        "class Mine(PreTrainedTokenizerFast):\n    pass\n"
    )
    _edit_json(
        source / "tokenizer_config.json",
        tokenizer_class="Mine",
        auto_map={"AutoTokenizer": ["mine.Mine", "mine.Mine"]},
    )
    settings = options(source)
    trusted = options(source, trust_remote_code=True)
    with pytest.raises(StartupError, match="--trust-remote-code"):
        prepare(settings)
    assert load_prepared(prepare(trusted)).name == "tiny-llama"


# -- what is refused ------------------------------------------------------------------------------


def _remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _break_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": [')


def _truncate_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _garble_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(b"\xff" * 16 + file.read_bytes()[16:])


def _empty_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def _pickle_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _lose_a_shard(folder: Path) -> None:
    _shard(folder)[1].unlink()


def _break_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


def _become(architecture: str, **config: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        _edit_json(folder / "config.json", architectures=[architecture], **config)

    return damage


SUPPORTED = "not supported; supported are LlamaForCausalLM, MistralForCausalLM"


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (_remove_config, "config.json is missing: .* is no complete model folder"),
        (_break_config, "config.json is not valid JSON"),
        (_truncate_weights, "model.safetensors is truncated: [0-9]+ bytes of [0-9]+"),
        (_garble_header, "model.safetensors is no safetensors file or is damaged"),
        (_empty_weights, "model.safetensors is no safetensors file or is damaged"),
        (_pickle_weights, "only as pickle files, which can run code"),
        (_remove_weights, "holds no weights .*--load-format dummy"),
        (_lose_a_shard, "1 of [0-9]+ weight files are missing"),
        (_break_tokenizer, "no tokenizer that can be read"),
        (_become("LlavaForConditionalGeneration"), SUPPORTED),
        (_become("T5ForConditionalGeneration"), SUPPORTED),
        (_become("MixtralForCausalLM"), SUPPORTED),
        (_become("JambaForCausalLM"), SUPPORTED),
    ],
)
def test_bad_folder_is_one_sentence(
    source: Path, options: Options, damage: Callable[[Path], None], sentence: str
) -> None:
    damage(source)
    with pytest.raises(StartupError, match=sentence) as caught:
        prepare(options(source))
    assert "\n" not in str(caught.value)
    prepared = Path(options(source).cache_dir) / "prepared"
    assert [path for path in prepared.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("/nowhere/model", "no such model folder or .gguf file"),
        ("./model", "no such model folder or .gguf file"),
        ("weights.gguf", "weights.gguf: no such file"),
        ("smolm2-135m", "did you mean smollm2-135m-instruct"),
        ("qwen", r"no built-in name \(smollm2-135m-instruct\), and a Hub id has the form"),
    ],
)
def test_unknown_model_says_what_a_model_is(options: Options, name: str, sentence: str) -> None:
    with pytest.raises(StartupError, match=sentence):
        prepare(options(name))


def test_file_of_another_kind_is_refused(tmp_path: Path, options: Options) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(StartupError, match="neither a model folder nor a"):
        prepare(options(file))


def test_missing_template_file_is_refused(source: Path, options: Options) -> None:
    with pytest.raises(StartupError, match="--chat-template nowhere"):
        prepare(options(source, chat_template="nowhere.jinja"))


def test_missing_tokenizer_folder_is_refused(source: Path, options: Options) -> None:
    with pytest.raises(StartupError, match="--tokenizer /nowhere: no such folder"):
        prepare(options(source, tokenizer="/nowhere"))


def test_revision_of_a_local_model_is_refused(source: Path, options: Options) -> None:
    with pytest.raises(StartupError, match="--revision main is for Hub ids"):
        prepare(options(source, revision="main"))


def test_cache_that_cannot_be_written_is_a_sentence(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match=r"cannot prepare .*--cache-dir chooses another place"):
        prepare(ModelSettings(model=str(source), cache_dir=str(tmp_path / "file")))


def test_settings_defaults_name_the_builtin_model() -> None:
    from pagemesh.prepare.builtin import MODELS

    assert ModelSettings().model in MODELS

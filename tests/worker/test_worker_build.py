"""From settings to a runner, with a random model of real shape and with the real one."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from structlog.testing import capture_logs
from tokenizers import Tokenizer
from worker_harness import GREEDY, Driver

from pagemesh.kernels.cpu.code_folder import CODE_FOLDER
from pagemesh.shared import grammar as grammar_module
from pagemesh.shared.errors import SettingsError, StartupError
from pagemesh.shared.messages import Capacity
from pagemesh.shared.prepared import MANIFEST, PreparedModel
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.settings import (
    CacheSettings,
    ModelSettings,
    ParallelSettings,
    SchedulerSettings,
    Settings,
)
from pagemesh.shared.structured_outputs import StructuredOutputsParams
from pagemesh.worker_svc import cpu_build as build_module
from pagemesh.worker_svc.build import build_runner
from pagemesh.worker_svc.models.decoder import Decoder

MIB = 2**20
KV_BYTES_PER_TOKEN = 2 * 2 * 2 * 8 * 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A prepared model without weights."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1000,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    prepared = PreparedModel(
        name="dummy",
        source="here",
        architecture="LlamaForCausalLM",
        weights_format="dummy",
        weights=[],
        vocab_tokens=300,
        max_position_tokens=1000,
        bos_token_id=1,
        eos_token_ids=[2, 3],
        template_tokens={},
        fingerprint="abc",
        created_s=77,
    )
    (tmp_path / MANIFEST).write_bytes(msgspec.json.encode(prepared))
    return tmp_path


def settings_for(
    folder: Path,
    *,
    cache: CacheSettings | None = None,
    scheduler: SchedulerSettings | None = None,
    parallel: ParallelSettings | None = None,
    **model: object,
) -> Settings:
    return Settings(
        model=ModelSettings(model=str(folder), **({"dtype": "float32"} | model)),
        cache=cache or CacheSettings(kv_cache_memory="1MiB"),
        scheduler=scheduler or SchedulerSettings(),
        parallel=parallel or ParallelSettings(threads=1),
    )


def test_card_capacity_and_stages(folder: Path) -> None:
    stages: list[str] = []
    runner = build_runner(settings_for(folder), stages.append)
    assert stages == [
        "loading the weights of dummy",
        "laying out the KV cache",
        "loading the kernels, which the first start on a machine compiles",
    ]
    card = runner.card
    assert (card.names, card.vocab_tokens, card.max_model_len) == (["dummy"], 300, 1000)
    assert (card.block_tokens, card.dtype) == (16, "float32")
    assert (card.bos_token_id, card.eos_token_ids) == (1, [2, 3])
    assert (card.fingerprint, card.created_s) == ("abc", 77)
    blocks = MIB // (16 * KV_BYTES_PER_TOKEN)
    assert runner.capacity == Capacity(blocks, 256, 512, KV_BYTES_PER_TOKEN, "cpu")
    assert runner.live_rows == 0


def test_the_division_is_logged(folder: Path) -> None:
    with capture_logs() as logs:
        runner = build_runner(settings_for(folder))
    (line,) = [entry for entry in logs if entry["event"] == "memory_divided"]
    blocks = runner.capacity.num_blocks
    assert line["weights_bytes"] == runner._executor._model.weights_bytes
    assert dict(line["table"])["KV pool"].startswith(f"1.0 MiB: {blocks:,} blocks")
    assert line["kv_bytes_per_token"] == KV_BYTES_PER_TOKEN
    assert (line["kv_blocks"], line["kv_tokens"]) == (blocks, (blocks - 1) * 16)
    assert line["fitting_requests"] == (blocks - 1) // 63


def test_the_stages_of_a_start_are_logged(folder: Path) -> None:
    with capture_logs() as logs:
        build_runner(settings_for(folder), own_process=True)
    (line,) = [entry for entry in logs if entry["event"] == "started"]
    seconds = line["seconds"]
    assert list(seconds) == ["imports", "weights", "kv_pool", "first_token", "rules", "total"]
    age_s = time.time() - psutil.Process().create_time()
    assert 0 < seconds["total"] <= age_s + 1
    assert seconds["imports"] > seconds["weights"]  # of this whole test run
    assert line["kernels_kept_in"] == str(CODE_FOLDER)


def test_names_block_size_budget_and_type_are_the_settings(folder: Path) -> None:
    runner = build_runner(
        settings_for(
            folder,
            cache=CacheSettings(kv_cache_memory="1MiB", block_size=8),
            scheduler=SchedulerSettings(max_num_seqs=3, max_num_batched_tokens=99),
            served_model_name=["one", "two"],
            dtype="auto",
            max_model_len=40,
        )
    )
    assert runner.card.names == ["one", "two"]
    assert (runner.card.max_model_len, runner.card.block_tokens) == (40, 8)
    assert runner.card.dtype == "bfloat16"
    assert runner.capacity == Capacity(3 * 5 + 1, 3, 99, KV_BYTES_PER_TOKEN // 2, "cpu")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types(folder: Path, dtype: str) -> None:
    runner = build_runner(settings_for(folder, dtype=dtype))
    assert runner.card.dtype == dtype
    assert runner.capacity.kv_bytes_per_token == KV_BYTES_PER_TOKEN // 2


def test_int8_keeps_matrices_as_bytes_and_the_pool_as_it_is(folder: Path) -> None:
    wide = build_runner(settings_for(folder, dtype="bfloat16"))
    narrow = build_runner(settings_for(folder, dtype="bfloat16", quantization="int8"))
    assert (wide.card.quantization, narrow.card.quantization) == ("none", "int8")
    assert narrow.card == wide.card._replace(quantization="int8")
    assert narrow.capacity == wide.capacity
    # Scales are float32: much beside rows of 32 inputs.
    assert 0.5 < narrow._executor._model.weights_bytes / wide._executor._model.weights_bytes < 0.7


def test_the_smallest_pool_and_length(folder: Path) -> None:
    """Two blocks of one token: the first token is still generated."""
    cache = CacheSettings(kv_cache_memory=str(2 * KV_BYTES_PER_TOKEN), block_size=1)
    assert build_runner(settings_for(folder, cache=cache)).card.max_model_len == 1


@pytest.mark.parametrize(
    ("changes", "key", "sentence"),
    [
        (
            {"parallel": ParallelSettings(tensor_parallel_size=2)},
            "tensor_parallel_size",
            "--tensor-parallel-size 2 is not supported yet",
        ),
        ({"parallel": ParallelSettings(device="cuda")}, "device", "use --device cpu"),
        ({"parallel": ParallelSettings(enforce_eager=True)}, "enforce_eager", "no effect on a CPU"),
        (
            {"cache": CacheSettings(gpu_memory_utilization=0.5)},
            "gpu_memory_utilization",
            "set --kv-cache-memory",
        ),
        ({"max_model_len": 1001}, "max_model_len", "choose 1 to 1000"),
        (
            {"scheduler": SchedulerSettings(enable_chunked_prefill=False)},
            "max_num_batched_tokens",
            "set --max-num-batched-tokens 1000",
        ),
        ({"cache": CacheSettings(kv_cache_memory="900TiB")}, "kv_cache_memory", "available"),
    ],
)
def test_settings_that_cannot_work(
    folder: Path, changes: dict[str, object], key: str, sentence: str
) -> None:
    with pytest.raises(SettingsError, match=sentence) as error:
        build_runner(settings_for(folder, **changes))
    assert error.value.key == key
    assert "\n" not in str(error.value)


def test_an_explicit_length_that_does_not_fit(folder: Path) -> None:
    cache = CacheSettings(kv_cache_memory=str(5 * 16 * KV_BYTES_PER_TOKEN))
    with pytest.raises(StartupError, match=r"--kv-cache-memory \d+ or --max-model-len 64$"):
        build_runner(settings_for(folder, cache=cache, max_model_len=65))


def test_a_folder_that_was_never_prepared(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="pagemesh prepare"):
        build_runner(Settings(model=ModelSettings(model="nothing", cache_dir=str(tmp_path))))


def test_weights_larger_than_the_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "available_bytes", lambda: 1000)
    with pytest.raises(StartupError, match="not enough memory for dummy") as error:
        build_runner(settings_for(folder))
    assert "1000 bytes are available" in str(error.value)


def test_an_allocation_that_fails_while_loading(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> Decoder:
        torch.empty(2**60, dtype=torch.uint8)
        raise AssertionError("no machine has that much")

    monkeypatch.setattr(build_module, "load_decoder", load)
    with pytest.raises(StartupError, match="not enough memory for dummy"):
        build_runner(settings_for(folder))


def test_weights_that_give_no_numbers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = build_module.load_decoder

    def damaged(*args: object, **kwargs: object) -> Decoder:
        decoder = whole(*args, **kwargs)
        decoder.norm.weight.fill_(torch.nan)
        return decoder

    monkeypatch.setattr(build_module, "load_decoder", damaged)
    with pytest.raises(StartupError, match="not finite in float32"):
        build_runner(settings_for(folder))


@pytest.mark.model
def test_the_real_model_speaks(smollm2_folder: Path) -> None:
    """Chunked, on odd borders, beside another request: the same words."""
    tokenizer = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    runner = build_runner(
        settings_for(smollm2_folder, cache=CacheSettings(kv_cache_memory="64MiB"))
    )
    ids = tokenizer.encode("The capital of France is").ids
    answers = []
    for chunks in ([len(ids)], [2, 1, len(ids) - 3]):
        driver = Driver(runner, block_tokens=16)
        driver.enter(9, ids, GREEDY)
        driver.enter(4, ids[::-1], GREEDY)
        tokens = []
        driver.run({4: len(ids)})
        for n in (*chunks, 1, 1, 1, 1):
            step = driver.plan({4: 1, 9: n})
            token = driver.sampled(step, runner.execute(step)).get(9)
            tokens += [] if token is None else [token]
        answers.append(tokens)
    assert answers[0] == answers[1]
    assert "Paris" in tokenizer.decode(answers[0])


@pytest.mark.model
def test_a_process_of_its_own_has_read_the_vocabulary_before_any_request(
    smollm2_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading it stops every other thread for a second or more: the links would be given up."""
    settings = settings_for(smollm2_folder, cache=CacheSettings(kv_cache_memory="64MiB"))
    runner = build_runner(settings, own_process=True)
    monkeypatch.setattr(grammar_module, "LLTokenizer", None)
    driver = Driver(runner, block_tokens=16)
    rule = StructuredOutputsParams(choice=["Paris"])
    driver.enter(0, [1, 2, 3], SamplingParams(structured_outputs=rule))
    assert driver.run({0: 3}).failed == []

"""A worker's start on a GPU, from settings to the first token; where there is none the card is
acted out, and its kernels run in the interpreter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import host_device
import msgspec
import pytest
import torch
from structlog.testing import capture_logs

from pagemesh.shared.errors import StartupError
from pagemesh.shared.prepared import MANIFEST, PreparedModel, load_prepared
from pagemesh.shared.settings import ModelSettings, SchedulerSettings, Settings
from pagemesh.worker_svc.build import warm_up
from pagemesh.worker_svc.gpu import build as build_module
from pagemesh.worker_svc.gpu.build import load_on_gpu
from pagemesh.worker_svc.gpu.card import Reading
from pagemesh.worker_svc.gpu.memory import Card, Needs, StepTooLarge, Wanted
from pagemesh.worker_svc.runner import Runner
from pagemesh.worker_svc.stages import Stages

GIB, MIB = 2**30, 2**20
CARD = Card(name="a card", total_bytes=2 * GIB, others_bytes=64 * MIB)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 48,
}
SETTINGS = Settings(
    model=ModelSettings(dtype="float32"),
    scheduler=SchedulerSettings(max_num_seqs=2, max_num_batched_tokens=8),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    prepared = PreparedModel(
        name="dummy",
        source="here",
        architecture="LlamaForCausalLM",
        weights_format="dummy",
        weights=[],
        vocab_tokens=97,
        max_position_tokens=48,
        bos_token_id=1,
        eos_token_ids=[5],
        template_tokens={},
        fingerprint="abc",
        created_s=77,
    )
    (tmp_path / MANIFEST).write_bytes(msgspec.json.encode(prepared))
    return tmp_path


@pytest.fixture
def card(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the memory is acted out where there is a card."""
    host_device.act_out(monkeypatch, device)
    monkeypatch.setattr(build_module, "look_at", lambda device: CARD)
    if device == "cpu":
        monkeypatch.setattr(build_module, "require_card", lambda: torch.device("cpu"))
        monkeypatch.setattr(
            build_module, "read_memory", lambda device: Reading(GIB, 0, 0, 64 * MIB, 0)
        )
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)


def start(folder: Path, settings: Settings = SETTINGS) -> tuple[Runner, list[str]]:
    told: list[str] = []
    stages = Stages(told.append)
    runner = load_on_gpu(settings, folder, load_prepared(folder), stages, None)
    return runner, list(stages.finish())


def test_a_start_ends_with_a_token(card: None, folder: Path) -> None:
    with capture_logs() as logs:
        runner, stages = start(folder)
    warm_up(runner)
    assert stages == [
        "imports",
        "device",
        "weights",
        "kernels",
        "rehearsal",
        "kv_pool",
        "graphs",
        "total",
    ]
    assert (runner.card.max_model_len, runner.capacity.num_blocks) == (48, 2 * 3 + 1)
    assert runner.capacity.max_num_batched_tokens == 8
    (line,) = [entry for entry in logs if entry["event"] == "memory_divided"]
    assert line["kv_blocks"] == 7
    assert dict(line["table"])["device"] == "a card, 2.0 GiB"


def test_a_card_that_is_too_small_for_the_weights(
    card: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "look_at", lambda device: replace(CARD, total_bytes=MIB))
    with pytest.raises(StartupError, match=r"weights of dummy, .* do not fit a card"):
        start(folder)


def replace_scheduler(scheduler: SchedulerSettings) -> Settings:
    return msgspec.structs.replace(SETTINGS, scheduler=scheduler)


class Rehearsal:
    """In place of the real one: steps as small as `fits` pass, and take `step_bytes` a token."""

    def __init__(self, fits: tuple[int, int], step_bytes: int = MIB) -> None:
        self.fits = fits
        self.step_bytes = step_bytes
        self.tried: list[tuple[int, int]] = []

    def __call__(self, assemble: Any, read: Any, weights_bytes: int) -> Needs:
        wanted: Wanted = assemble.args[1]
        self.tried.append((wanted.step_tokens, wanted.max_num_seqs))
        if wanted.step_tokens > self.fits[0]:
            raise StepTooLarge("step_tokens")
        if wanted.max_num_seqs > self.fits[1]:
            raise StepTooLarge("max_num_seqs")
        return Needs(
            weights_bytes=MIB,
            slots_bytes=0,
            step_bytes=self.step_bytes * wanted.step_tokens,
            step_bytes_per_token=self.step_bytes,
        )


@pytest.mark.parametrize(
    ("fits", "step_bytes", "flags"),
    [
        ((256, 64), MIB, "set --max-num-batched-tokens 256"),
        ((1024, 20), MIB, "set --max-num-seqs 16"),
        ((300, 8), MIB, "set --max-num-batched-tokens 256 --max-num-seqs 8"),
        # It runs, but leaves no room for a pool.
        ((1024, 8), 6 * MIB, "set --max-num-batched-tokens 256 --max-num-seqs 8"),
        ((0, 0), MIB, "serve a smaller model"),
    ],
)
def test_what_is_too_large_is_tried_smaller_and_named(
    card: None,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    fits: tuple[int, int],
    step_bytes: int,
    flags: str,
) -> None:
    rehearsal = Rehearsal(fits, step_bytes)
    monkeypatch.setattr(build_module, "dry_run", lambda runner, executor: None)
    monkeypatch.setattr(build_module, "rehearse", rehearsal)
    scheduler = SchedulerSettings(max_num_seqs=64, max_num_batched_tokens=1024)
    with pytest.raises(StartupError, match=f"{flags}$"):
        start(folder, replace_scheduler(scheduler))
    assert rehearsal.tried[0] == (1024, 64)


def test_a_dry_run_that_is_short_of_memory_leaves_the_word_to_the_rehearsal(
    card: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(build_module, "dry_run", fail)
    monkeypatch.setattr(build_module, "rehearse", Rehearsal((4, 2)))
    with pytest.raises(StartupError, match=r"set --max-num-batched-tokens 4$"):
        start(folder)


def test_memory_that_goes_in_the_middle_of_a_start(
    card: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(decoder: Any, *_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(build_module, "fill_decoder", fail)
    with pytest.raises(StartupError, match="a card ran out of memory while dummy was started"):
        start(folder)


def test_an_error_that_is_not_of_memory_is_not_taken_for_one(
    card: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(decoder: Any, *_: object) -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(build_module, "fill_decoder", fail)
    with pytest.raises(RuntimeError, match="shapes differ"):
        start(folder)

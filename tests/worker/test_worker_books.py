"""What a worker tells of its model."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import torch
from structlog.testing import capture_logs
from worker_harness import CONFIG

from pagemesh.shared.prepared import MANIFEST, PreparedModel
from pagemesh.shared.settings import ModelSettings, Settings
from pagemesh.worker_svc.books import model_card
from pagemesh.worker_svc.memory import MemoryPlan

PREPARED = PreparedModel(
    name="tiny",
    source="test",
    architecture="LlamaForCausalLM",
    weights_format="dummy",
    weights=[],
    vocab_tokens=97,
    max_position_tokens=64,
    bos_token_id=1,
    eos_token_ids=[5],
    template_tokens={},
    fingerprint="f00d",
    created_s=1,
)


def test_the_models_own_sampling_parameters_are_on_its_card_and_in_the_log(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(msgspec.json.encode(PREPARED))
    config = {"temperature": 0.6, "max_new_tokens": 9, "eos_token_id": [7, 5]}
    (tmp_path / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    plan = MemoryPlan(kv_bytes_per_token=1, block_tokens=4, num_blocks=9, max_model_len=32)
    for setting, defaults, ends in (
        ("auto", {"temperature": 0.6, "max_tokens": 9}, [5, 7]),
        ("vllm", {}, [5]),
    ):
        model = ModelSettings(model=str(tmp_path), generation_config=setting)
        with capture_logs() as lines:
            card = model_card(Settings(model=model), PREPARED, CONFIG, plan, torch.float32)
        assert (card.defaults, card.eos_token_ids) == (defaults, ends)
        [line] = lines
        assert line["event"] == "sampling_defaults"
        assert line.items() >= defaults.items()

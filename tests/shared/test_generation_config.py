"""The model's own sampling parameters: read, checked, or left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagemesh.shared.errors import StartupError
from pagemesh.shared.generation_config import FILE, GenerationConfig, generation_config

QWEN = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": None,
    "repetition_penalty": 1.0,
    "max_new_tokens": 2048,
}


def write(folder: Path, config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_what_differs_from_the_defaults_is_kept(tmp_path: Path) -> None:
    found = generation_config(write(tmp_path, QWEN), "auto")
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_tokens": 2048}
    assert found == GenerationConfig(defaults, [151645, 151643])


def test_it_may_be_another_folders_or_none(tmp_path: Path) -> None:
    model = write(tmp_path / "model", QWEN)
    other = write(tmp_path / "other", {"top_k": 3, "eos_token_id": 9})
    assert generation_config(model, str(other)) == GenerationConfig({"top_k": 3}, [9])
    assert generation_config(model, "vllm") == GenerationConfig()
    assert generation_config(tmp_path, "auto") == GenerationConfig()


@pytest.mark.parametrize(
    "config",
    [
        {"top_p": 3},
        {"top_k": 1.5},
        {"temperature": "hot"},
        {"temperature": -1},
        {"max_new_tokens": 0},
        {"max_new_tokens": 10**20},
        {"eos_token_id": [2, 10**30]},
        {"eos_token_id": "</s>"},
        ["temperature"],
    ],
)
def test_one_that_cannot_be_used_stops_the_start_with_a_way_out(
    tmp_path: Path, config: Any
) -> None:
    with pytest.raises(
        StartupError, match=r"generation_config\.json .*--generation-config to vllm"
    ):
        generation_config(write(tmp_path, config), "auto")


def test_a_folder_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--generation-config"):
        generation_config(tmp_path, str(tmp_path / "nowhere"))

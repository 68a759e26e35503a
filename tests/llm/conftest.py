"""The offline class over a tiny random model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llm_helpers import MakeLLM
from tiny_llama import save_tiny_llama

from pagemesh import LLM


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llm") / "tiny-llama")


@pytest.fixture(scope="session")
def make_llm(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeLLM:
    cache = tmp_path_factory.mktemp("llm-cache")

    def make(model: Path = tiny_folder, **settings: Any) -> LLM:
        usual = {
            "dtype": "float32",
            "threads": 1,
            "kv_cache_memory": "4MiB",
            "cache_dir": str(cache),
        }
        return LLM(str(model), **{**usual, **settings})

    return make


@pytest.fixture(scope="session")
def llm(make_llm: MakeLLM) -> LLM:
    return make_llm()

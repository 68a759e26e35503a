"""A model that loads at once, for tests that start many services."""

from __future__ import annotations

import pytest
from mesh_parts import STORY
from tiny_llama import save_tiny_llama

from pagemesh.prepare import prepare
from pagemesh.shared.settings import ModelSettings


@pytest.fixture(scope="session")
def tiny_settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The settings of a prepared model of random weights, called as STORY says."""
    folder = tmp_path_factory.mktemp("tiny")
    model = str(save_tiny_llama(folder / "model"))
    prepare(ModelSettings(model=model, cache_dir=str(folder)))
    return {
        "model": model,
        "cache_dir": str(folder),
        "served_model_name": STORY["model"],
        "dtype": "float32",
        "kv_cache_memory": "16MiB",
        "log_level": "debug",
    }

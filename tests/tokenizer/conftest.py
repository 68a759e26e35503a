"""Models whose text side the tests use."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_tokenizers import (
    byte_level_json,
    metaspace_json,
    sentencepiece_json,
    text_model,
    write_folder,
)

from pagemesh.shared.settings import Settings
from pagemesh.tokenizer_svc.text_model import TextModel


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder = tmp_path_factory.mktemp("byte-level")
    return text_model(folder, write_folder(folder, byte_level_json()))


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder = tmp_path_factory.mktemp("sentencepiece")
    return text_model(folder, write_folder(folder, sentencepiece_json()))


@pytest.fixture(scope="session")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder = tmp_path_factory.mktemp("metaspace")
    return text_model(folder, write_folder(folder, metaspace_json()))


@pytest.fixture(scope="session")
def smollm2(smollm2_folder: Path) -> TextModel:
    return text_model(smollm2_folder, Settings())

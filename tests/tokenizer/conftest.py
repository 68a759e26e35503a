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
def byte_level_settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return write_folder(tmp_path_factory.mktemp("byte-level"), byte_level_json())


@pytest.fixture(scope="session")
def byte_level(byte_level_settings: Settings) -> TextModel:
    return text_model(Path(byte_level_settings.model.model), byte_level_settings)


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

"""Models whose text side the tests use, and the service between scripted neighbours."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from neighbours import Mesh, ScriptedGateway, ScriptedScheduler, running_service
from pipeline_driver import pipeline_of
from scripts import card_of, status_of
from small_tokenizers import (
    byte_level_json,
    metaspace_json,
    sentencepiece_json,
    text_model,
    write_folder,
)

from pagemesh.shared.messages import ModelCard
from pagemesh.shared.settings import Settings
from pagemesh.tokenizer_svc.pipeline import Pipeline
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


@pytest.fixture
def pipeline(byte_level: TextModel) -> Pipeline:
    return pipeline_of(byte_level)


@pytest.fixture
async def mesh(
    byte_level_settings: Settings, redis_url: str, mesh_name: str
) -> AsyncIterator[Mesh]:
    async with running_service(byte_level_settings, redis_url, mesh_name) as running:
        yield running


@pytest.fixture
def card(byte_level: TextModel) -> ModelCard:
    return card_of(byte_level, max_model_len=4096)


@pytest.fixture
async def scheduler(mesh: Mesh, card: ModelCard) -> AsyncIterator[ScriptedScheduler]:
    async with mesh.scheduler(status_of(card)) as running:
        yield running


@pytest.fixture
async def gateway(mesh: Mesh, scheduler: ScriptedScheduler) -> ScriptedGateway:
    connected = await mesh.gateway()
    await connected.ready()
    return connected

"""A tokenizer service of two models: each request is encoded, placed and decoded by its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from neighbours import Mesh, running_service
from scripts import card_of, generate, status_of, tokens
from small_tokenizers import byte_level_json, metaspace_json, write_folder
from structlog.testing import capture_logs

from pagemesh.shared.engine_messages import Ended
from pagemesh.shared.errors import RequestError, SettingsError
from pagemesh.shared.settings import ModelSettings, Settings
from pagemesh.shared.wire import pack_ids, unpack_ids
from pagemesh.tokenizer_svc.text_models import MAX_LEARNED_NAMES, TextModels, load_text_models


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("two")
    write_folder(folder / "one", byte_level_json(), name="one", fingerprint="1")
    write_folder(folder / "other", metaspace_json(), name="other", fingerprint="2")
    return Settings(model=ModelSettings(models=[str(folder / "one"), f"two={folder / 'other'}"]))


@pytest.fixture
def models(settings: Settings) -> TextModels:
    return load_text_models(settings)


@pytest.fixture
async def mesh(settings: Settings, redis_url: str, mesh_name: str) -> AsyncIterator[Mesh]:
    settings = replace(settings, gateway=replace(settings.gateway, request_timeout_s=0.2))
    async with running_service(settings, redis_url, mesh_name) as running:
        yield running


def test_models_are_found_by_name_and_by_card(models: TextModels) -> None:
    one, two = models
    assert models.names == ["one", "two"]
    assert (models.named("one"), models.named("two")) == (one, two)
    assert models.of(card_of(two)) is two
    assert not models.knows(card_of(two)._replace(fingerprint="3"))
    with pytest.raises(RequestError) as unknown:
        models.named("other")
    assert unknown.value.status == 404


def test_names_of_engines_are_learned_and_bounded(models: TextModels) -> None:
    _, two = models
    for i in range(MAX_LEARNED_NAMES + 1):
        models.learn(card_of(two)._replace(names=[f"n{i}"]))
    assert models.named(f"n{MAX_LEARNED_NAMES}") is two
    with pytest.raises(RequestError):
        models.named("n0")
    assert models.named("two") is two


def test_two_models_of_one_name_are_refused(tmp_path: Path, settings: Settings) -> None:
    write_folder(tmp_path, byte_level_json(), name="two", fingerprint="3")
    model = ModelSettings(models=[*settings.model.models, str(tmp_path)])
    with pytest.raises(SettingsError, match="two models are called two"):
        load_text_models(Settings(model=model))


def test_the_same_files_may_have_two_names(settings: Settings) -> None:
    folder = settings.model.models[0]
    models = load_text_models(Settings(model=ModelSettings(models=[folder, f"again={folder}"])))
    assert models.named("again") is models.named("one")


async def test_each_request_goes_to_an_engine_of_its_model(mesh: Mesh, models: TextModels) -> None:
    cards = [card_of(model) for model in models]
    engines = [status_of(card, f"of-{card.names[0]}") for card in cards]
    async with mesh.scheduler(*engines) as scheduler:
        gateway = await mesh.gateway()
        while len((await gateway.ready()).engines) < len(engines):
            pass
        for model, engine in zip(models, engines, strict=True):
            name = engine.card.names[0]
            gateway.ask(generate("Hello world", name, model=name))
            submit = await scheduler.submits.get()
            ids = model.encode(generate("Hello world").prompt)
            assert (submit.engine_id, unpack_ids(submit.prompt_ids)) == (engine.engine_id, ids)
            assert (await gateway.accepted(name)).prompt_ids == pack_ids(ids)
            end = Ended(submit.key, "length")
            scheduler.send(tokens({submit.key: ids}, ended=[end], engine_id=engine.engine_id))
            text = "".join(delta.text for delta in await gateway.rest(name))
            assert text == model.decode(ids)


async def test_a_model_without_an_engine_is_503_and_announced(
    mesh: Mesh, models: TextModels
) -> None:
    one, _ = models
    async with mesh.scheduler(status_of(card_of(one))):
        gateway = await mesh.gateway()
        assert (await gateway.ready()).names == ["one", "two"]
        gateway.ask(generate("Hello", "r1", model="two"))
        assert (await gateway.failed("r1")).error.status == 503
        gateway.ask(generate("Hello", "r2", model="nobody"))
        assert (await gateway.failed("r2")).error.status == 404


async def test_variants_of_one_name_are_told(mesh: Mesh, models: TextModels) -> None:
    card = card_of(next(iter(models)))
    int8 = card._replace(quantization="int8")
    with capture_logs() as logs:
        async with mesh.scheduler(status_of(int8, "a"), status_of(card, "b")) as scheduler:
            gateway = await mesh.gateway()
            await gateway.ready()
            for i in range(4):
                gateway.ask(generate("Hello", f"r{i}", model="one"))
                assert (await scheduler.submits.get()).engine_id == "b"
    told = [line for line in logs if line["event"] == "variants_share_a_name"]
    assert [(line["in_use"], line["idle"]) for line in told] == [(card.variant, [int8.variant])]

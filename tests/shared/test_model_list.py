"""The models of a mesh, as the settings list them."""

from __future__ import annotations

import pytest

from pagemesh.shared.errors import SettingsError
from pagemesh.shared.model_list import MAX_MODELS, check_models, listed_models, of_one_model
from pagemesh.shared.settings import ModelSettings, Settings

TWO = ModelSettings(models=["org/large", "small=./a=b"], dtype="float32")


def test_without_a_list_there_is_the_one_model() -> None:
    model = ModelSettings(model="org/large", served_model_name=["x", "y"])
    assert listed_models(model) == [model]
    assert of_one_model(Settings(model=model)).model == model


def test_each_of_a_list_has_settings_of_its_own() -> None:
    assert listed_models(TWO) == [
        ModelSettings(model="org/large", dtype="float32"),
        ModelSettings(model="./a=b", served_model_name=["small"], dtype="float32"),
    ]


@pytest.mark.parametrize(("asked", "source"), [("org/large", "org/large"), ("small", "./a=b")])
def test_a_worker_serves_the_one_that_model_names(asked: str, source: str) -> None:
    settings = Settings(model=ModelSettings(models=TWO.models, model=asked))
    found = of_one_model(settings).model
    assert (found.model, found.models) == (source, [])


def test_a_worker_of_several_models_is_refused() -> None:
    with pytest.raises(SettingsError, match="name one of them with --model"):
        of_one_model(Settings(model=TWO))


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (ModelSettings(models=["a", "b"], served_model_name=["x"]), "write NAME=MODEL"),
        (ModelSettings(models=["a", "b"], tokenizer="x"), "tokenizer is of one model"),
        (ModelSettings(models=["a", "a"]), "models lists a twice"),
        (ModelSettings(models=["x=a", "x=b"]), "models lists x twice"),
        (ModelSettings(models=["=a"]), "neither is empty"),
        (ModelSettings(models=[str(i) for i in range(MAX_MODELS + 1)]), "at most 32"),
    ],
)
def test_a_list_that_cannot_work_is_refused(model: ModelSettings, sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        check_models(model)
    check_models(TWO)

"""Which models the settings name: one, or several of one mesh. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Final

from msgspec.structs import replace

from pagemesh.shared.errors import SettingsError
from pagemesh.shared.settings import ModelSettings, Settings

# Each holds a tokenizer in every tokenizer service.
MAX_MODELS: Final = 32
_OF_ONE_MODEL: Final = ("revision", "tokenizer", "chat_template")


def listed_models(model: ModelSettings) -> list[ModelSettings]:
    """Each model as settings of its own: those of `models`, or else the one of `model`."""
    if not model.models:
        return [model]
    return [_entry(model, text) for text in model.models]


def _entry(model: ModelSettings, text: str) -> ModelSettings:
    """Of MODEL or NAME=MODEL. A path that holds = needs a name in front."""
    name, is_named, source = text.partition("=")
    if not is_named:
        return replace(model, model=text, models=[])
    return replace(model, model=source, served_model_name=[name], models=[])


def of_one_model(settings: Settings) -> Settings:
    """For a process that serves one model: the one of `model`, which names one of `models` if there
    are several. Raises SettingsError when it names none of them."""
    listed = listed_models(settings.model)
    asked = settings.model.model
    if len(listed) > 1:
        listed = [each for each in listed if asked in (each.model, *each.served_model_name)]
    if len(listed) != 1:
        raise SettingsError(
            f"one process serves one model, and models lists {', '.join(settings.model.models)}: "
            "name one of them with --model",
            key="model",
        )
    return replace(settings, model=listed[0])


def n_workers(settings: Settings) -> int:
    """Workers that `pagemesh serve` starts, of all models together."""
    return settings.mesh.workers * len(listed_models(settings.model))


def check_models(model: ModelSettings) -> None:
    """Raises SettingsError for a list that cannot be served together."""
    if len(model.models) > MAX_MODELS:
        raise SettingsError(f"models must list at most {MAX_MODELS}", key="models")
    listed = listed_models(model)
    if not all(each.model and all(each.served_model_name) for each in listed):
        raise SettingsError("models lists MODEL or NAME=MODEL, and neither is empty", key="models")
    if len(listed) > 1:
        _check_several(model, listed)


def _check_several(model: ModelSettings, listed: list[ModelSettings]) -> None:
    if model.served_model_name:
        raise SettingsError(
            "served_model_name names one model: with several, write NAME=MODEL in their list",
            key="served_model_name",
        )
    for key in _OF_ONE_MODEL:
        if getattr(model, key) is not None:
            raise SettingsError(
                f"{key} is of one model: run `pagemesh prepare` with it for that model alone, and "
                "list the folder that it prints",
                key=key,
            )
    names = Counter(name for each in listed for name in each.served_model_name or [each.model])
    name, n = names.most_common(1)[0]
    if n > 1:
        raise SettingsError(f"models lists {name} twice", key="models")

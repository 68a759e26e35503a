"""The models of one tokenizer service: by fingerprint for engines, by name for clients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from msgspec.structs import replace

from pagemesh.shared.errors import RequestError, SettingsError
from pagemesh.shared.messages import ModelCard
from pagemesh.shared.model_list import listed_models
from pagemesh.shared.prepared import load_prepared, prepared_folder
from pagemesh.shared.settings import Settings
from pagemesh.tokenizer_svc.text_model import TextModel

# Engines bring names of their own; those of the oldest are forgotten beyond this.
MAX_LEARNED_NAMES: Final = 1024


class TextModels:
    """Raises SettingsError when two models have one name."""

    def __init__(self, models: Iterable[TextModel]) -> None:
        self._by_fingerprint: dict[str, TextModel] = {}
        self._by_name: dict[str, TextModel] = {}
        self._learned: dict[str, TextModel] = {}
        for model in models:
            self._add(model)

    def _add(self, model: TextModel) -> None:
        """The same files may be listed under several names."""
        first = self._by_fingerprint.setdefault(model.prepared.fingerprint, model)
        for name in model.names:
            if self._by_name.setdefault(name, first) is not first:
                raise SettingsError(
                    f"two models are called {name}: list them as NAME=MODEL", key="models"
                )

    def __iter__(self) -> Iterator[TextModel]:
        return iter(self._by_fingerprint.values())

    @property
    def names(self) -> list[str]:
        """Those of the settings."""
        return list(self._by_name)

    def knows(self, card: ModelCard) -> bool:
        """Whether we can speak with its engine: one of other files has another vocabulary."""
        return card.fingerprint in self._by_fingerprint

    def of(self, card: ModelCard) -> TextModel:
        return self._by_fingerprint[card.fingerprint]

    def learn(self, card: ModelCard) -> None:
        """An engine serves one of our models, maybe under more names; they outlive it."""
        for name in card.names:
            self._learned.pop(name, None)
            self._learned[name] = self.of(card)
        while len(self._learned) > MAX_LEARNED_NAMES:
            del self._learned[next(iter(self._learned))]

    def named(self, name: str) -> TextModel:
        """Raises RequestError (404) for a name that is neither ours nor an engine's."""
        model = self._learned.get(name) or self._by_name.get(name)
        if model is None:
            raise RequestError(
                f"The model `{name}` does not exist.",
                status=404,
                code="model_not_found",
                param="model",
            )
        return model


def load_text_models(settings: Settings) -> TextModels:
    """Of every model in the settings. Raises StartupError for a folder that cannot be read."""
    return TextModels(
        TextModel(folder, load_prepared(folder), replace(settings, model=model))
        for model in listed_models(settings.model)
        for folder in [prepared_folder(model)]
    )

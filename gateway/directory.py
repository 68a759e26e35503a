"""Which models exist and which tokenizer services serve them, from the lists the links push."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import EngineStatus, ModelCard

SHOWN_NAME_CHARS = 200
MAX_KNOWN_NAMES = 1024


class ServedModel(NamedTuple):
    """One name a client may use, and the card of the model behind it."""

    name: str
    card: ModelCard


class ModelDirectory:
    """The engines behind every open link. Pure; `update` replaces what a link last said."""

    def __init__(self) -> None:
        self._engines_by_link: dict[str, list[EngineStatus]] = {}
        self._models: dict[str, ServedModel] = {}
        self._links_by_model: dict[str, list[str]] = {}
        self._known: dict[str, None] = {}
        self.longest_context_tokens: int | None = None
        """Of every model with a live engine; None without any."""

    def update(
        self,
        link: str,
        engines: Iterable[EngineStatus],
        *,
        draining: bool = False,
        names: Iterable[str] = (),
    ) -> None:
        """Take the list of `link`, and the `names` that it could serve if there were engines. A
        draining link keeps its requests but gets no new ones."""
        self._engines_by_link[link] = [] if draining else list(engines)
        self._note_known(names)
        self._rebuild()

    def drop(self, link: str) -> None:
        self._engines_by_link.pop(link, None)
        self._rebuild()

    def _rebuild(self) -> None:
        self._models = {}
        self._links_by_model = {}
        for link, engines in self._engines_by_link.items():
            for name in dict.fromkeys(name for each in engines for name in each.card.names):
                self._links_by_model.setdefault(name, []).append(link)
        for engine in self.engines():
            for name in engine.card.names:
                self._take(ServedModel(name, engine.card))
        self._note_known(self._models)
        lengths = (model.card.max_model_len for model in self._models.values())
        self.longest_context_tokens = max(lengths, default=None)

    def _take(self, model: ServedModel) -> None:
        """Of several engines' cards, the one with the longest context counts."""
        known = self._models.setdefault(model.name, model)
        if known.card.max_model_len < model.card.max_model_len:
            self._models[model.name] = model

    def _note_known(self, names: Iterable[str]) -> None:
        """The oldest names are forgotten beyond MAX_KNOWN_NAMES."""
        for name in names:
            self._known.pop(name, None)
            self._known[name] = None
        while len(self._known) > MAX_KNOWN_NAMES:
            del self._known[next(iter(self._known))]

    @property
    def models(self) -> list[ServedModel]:
        """Every name with a live engine, aliases as entries of their own."""
        return list(self._models.values())

    def engines(self) -> list[EngineStatus]:
        """Every live engine once, however many links report it."""
        unique = {e.engine_id: e for engines in self._engines_by_link.values() for e in engines}
        return list(unique.values())

    def links_serving(self, model: str) -> list[str]:
        return self._links_by_model.get(model, [])

    def live(self, model: str) -> ServedModel | None:
        """The model called `model`, if an engine of it is alive."""
        return self._models.get(model)

    def resolve(self, model: str | None, more_names: Iterable[str] = ()) -> ServedModel:
        """The model called `model`; None means the only one. `more_names` are served as well.

        Raises RequestError: 503 while no engine is alive for it, 404 when nobody knows the name.
        """
        if model is None:
            return self._only_model()
        found = self._models.get(model)
        if found is not None:
            return found
        if not self._known or model in self._known:
            raise not_ready("no engine for this model is alive at the moment")
        served = ", ".join([*self._models, *more_names]) or "nothing at the moment"
        raise RequestError(
            f"The model {model[:SHOWN_NAME_CHARS]!r} does not exist. Served here: {served}.",
            status=404,
            code="model_not_found",
            param="model",
        )

    def _only_model(self) -> ServedModel:
        if not self._models:
            raise not_ready("no engine is alive at the moment")
        cards = {model.card.names[0]: model for model in reversed(self._models.values())}
        if len(cards) > 1:
            raise RequestError(
                f"You must name a model. Served here: {', '.join(self._models)}.",
                code="missing_required_parameter",
                param="model",
            )
        primary = next(iter(cards))
        return self._models[primary]


def not_ready(reason: str) -> RequestError:
    return RequestError(
        f"The server is not ready: {reason}. Try again in a moment.",
        status=503,
        code="service_unavailable",
    )

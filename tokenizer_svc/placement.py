"""The engines below: waiting for one, handing requests to them and taking them back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

import structlog

from pagemesh.shared.engine_messages import End, ForgetCached, Lost, Submit
from pagemesh.shared.errors import LinkClosed, RequestError
from pagemesh.shared.link import Link
from pagemesh.shared.messages import Engines, EngineStats, EngineStatus, ModelCard
from pagemesh.shared.prefix_index import index_keys
from pagemesh.tokenizer_svc.dispatch import Ask, Chosen, Depths, Dispatch, Place
from pagemesh.tokenizer_svc.lookup import Lookup, LookupMetrics
from pagemesh.tokenizer_svc.text_models import TextModels
from pagemesh.tokenizer_svc.variants import variants_of

log = structlog.get_logger(__name__)
T = TypeVar("T")
NO_STATS: Final = EngineStats()


class Placement:
    """The asyncio shell around Dispatch. `on_change` runs when engines come, go or drain; not for
    their load, of which every scheduler reports five times a second."""

    def __init__(
        self,
        text_models: TextModels,
        lookup: Lookup,
        metrics: LookupMetrics,
        patience_s: float,
        on_change: Callable[[], None],
    ) -> None:
        self._text_models = text_models
        self._lookup = lookup
        self._metrics = metrics
        self._patience_s = patience_s
        self._on_change = on_change
        self._dispatch = Dispatch()
        self._links: dict[str, Link] = {}
        self._offers: dict[str, list[Any]] = {}
        self._changed = asyncio.Event()
        self._refused: set[tuple[object, ...]] = set()
        """Engines and variants that are not used, each told once."""

    def statuses(self) -> list[EngineStatus]:
        return self._dispatch.statuses()

    def known_card(self, name: str) -> ModelCard | None:
        """Of the model `name`, if there is an engine of it."""
        return self._dispatch.card(name)

    async def card(self, name: str) -> ModelCard:
        """The card to check a request for the model `name` against. Raises RequestError (503) when
        none appears."""
        return await self._when(lambda: self._dispatch.card(name))

    async def place(self, submits: Sequence[Submit], card: ModelCard, cache_key: str) -> Place:
        """Send all of `submits` to one engine, as soon as one can take them, and say which.

        `card` is the one they were checked against; requests of one `cache_key` belong together,
        where nothing better is known. Raises RequestError (503) when no engine
        appears in time, BadFrame for a placement that no frame can hold; `end` undoes the latter.
        """
        ask = Ask.of(submits, card, cache_key)
        await self._when(lambda: self._dispatch.candidates(ask.need) or None)
        depths = await self._depths(ask, submits[0], card)
        chosen = await self._when(lambda: self._dispatch.choose(ask, depths, time.monotonic()))
        place = chosen.place
        self._dispatch.place([submit.key for submit in submits], ask, chosen, time.monotonic())
        self._count(ask, chosen)
        # When the link is closed already, its reader is about to hand these keys back as lost.
        with suppress(LinkClosed):
            for submit in submits:
                self._links[place.scheduler].send(submit._replace(engine_id=place.engine_id))
        return place

    async def _depths(self, ask: Ask, submit: Submit, card: ModelCard) -> Depths | None:
        """Where there is nothing to choose, or nothing to find, nobody is asked."""
        if not ask.hashes or len(self._dispatch.candidates(ask.need)) < 2:
            return {}
        return await self._lookup.depths(index_keys(submit.hashes, card))

    def _count(self, ask: Ask, chosen: Chosen) -> None:
        self._metrics.prompt_tokens.inc(ask.known_tokens)
        self._metrics.hit_tokens.inc(ask.known_tokens - ask.uncached_tokens(chosen.cached_blocks))

    def begun(self, keys: Iterable[int]) -> None:
        """The engines have computed the prompts of `keys`."""
        self._dispatch.begun(keys)

    def end(self, keys: Iterable[int], reason: str) -> None:
        """Tell the engines that `keys` need no more tokens."""
        for scheduler, placed in self._dispatch.release(keys).items():
            with suppress(LinkClosed):
                self._links[scheduler].send(End(placed, reason))

    def reset_cache(self, model: str) -> list[str]:
        """Tell the engines of `model` to forget what no request uses. Returns which they are."""
        places = self._dispatch.forget_cached(model)
        for place in places:
            with suppress(LinkClosed):
                self._links[place.scheduler].send(ForgetCached(place.engine_id))
        return [place.engine_id for place in places]

    def release(self, keys: Iterable[int]) -> None:
        """The engines are done with `keys`."""
        self._dispatch.release(keys)

    def link_up(self, link: Link) -> None:
        self._links[link.name] = link
        self.update(link, Engines(link.peer.engines))

    def link_down(self, link: Link) -> list[int]:
        """Keys whose engines can no longer be reached."""
        self._links.pop(link.name, None)
        keys = self._dispatch.drop(link.name)
        self._offers.pop(link.name, None)
        self._notify(news=True)
        return keys

    def update(self, link: Link, message: Engines) -> None:
        ours = [status for status in message.engines if self._is_ours(status)]
        self._dispatch.update(link.name, ours, draining=message.draining)
        self._tell_of_variants({name for status in ours for name in status.card.names})
        offer = [message.draining, *(status._replace(stats=NO_STATS) for status in ours)]
        news = self._offers.get(link.name) != offer
        self._offers[link.name] = offer
        self._notify(news=news)

    def lost(self, link: Link, message: Lost) -> list[int]:
        """Keys of `message` that were still placed on the engine it names."""
        return self._dispatch.release_lost(Place(link.name, message.engine_id), message.keys)

    def _is_ours(self, status: EngineStatus) -> bool:
        """An engine of other weights would answer in another vocabulary: never use it."""
        if self._text_models.knows(status.card):
            self._text_models.learn(status.card)
            return True
        theirs = status.card.fingerprint
        if (status.engine_id, theirs) not in self._refused:
            self._refused.add((status.engine_id, theirs))
            log.error(
                "engine_refused",
                engine=status.engine_id,
                engine_model=status.card.names,
                engine_fingerprint=theirs,
                our_models=[
                    (model.prepared.name, model.prepared.fingerprint) for model in self._text_models
                ],
                remedy="start the tokenizer services with this model in their list, from the same "
                "files and settings as the worker's",
            )
        return False

    def _tell_of_variants(self, names: Iterable[str]) -> None:
        """One line for each set of variants that share a name."""
        cards = [status.card for status in self._dispatch.statuses()]
        for name in names:
            in_use, *idle = variants_of(name, cards)
            if idle and (name, *idle) not in self._refused:
                self._refused.add((name, *idle))
                log.error(
                    "variants_share_a_name",
                    model=name,
                    in_use=in_use,
                    idle=idle,
                    remedy="give the workers of each variant a --served-model-name of their own",
                )

    async def _when(self, find: Callable[[], T | None]) -> T:
        try:
            async with asyncio.timeout(self._patience_s):
                while (found := find()) is None:
                    await self._changed.wait()
        except TimeoutError as error:
            raise RequestError(
                f"no engine for this model became ready within {self._patience_s:g} s",
                status=503,
                code="engine_unavailable",
            ) from error
        return found

    def _notify(self, *, news: bool) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        if news:
            self._on_change()

"""Which engine gets a request, and which engine has which: pure state, no I/O, no clock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pagemesh.shared.engine_messages import Submit
from pagemesh.shared.messages import EngineStatus, ModelCard


class Place(NamedTuple):
    """An engine, by the scheduler link it is reached over."""

    scheduler: str
    engine_id: str


class Need(NamedTuple):
    """What an engine must offer for some choices of one request."""

    block_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, submits: Sequence[Submit], card: ModelCard) -> Need:
        """The block size is the one that the hashes were made with."""
        prompt_tokens = len(submits[0].prompt_ids) // 4
        answers = (submit.params.max_tokens or 0 for submit in submits)
        return cls(card.block_tokens, prompt_tokens + max(answers))

    def met_by(self, card: ModelCard) -> bool:
        return card.block_tokens == self.block_tokens and card.max_model_len >= self.total_tokens


class _Engine(NamedTuple):
    status: EngineStatus
    own_at_report: int
    draining: bool


class Dispatch:
    """The engines that schedulers offer, and the keys placed on them by this service.

    An engine that left its scheduler's list takes nothing new; its keys stay placed until the
    scheduler says they are lost, or its link ends.
    """

    def __init__(self) -> None:
        self._engines: dict[Place, _Engine] = {}
        self._places: dict[int, Place] = {}
        self._own: Counter[Place] = Counter()

    def statuses(self) -> list[EngineStatus]:
        return [engine.status for engine in self._engines.values()]

    def card(self) -> ModelCard | None:
        """The card requests are checked against: that of the engine with the longest context."""
        cards = (engine.status.card for engine in self._engines.values() if not engine.draining)
        return max(cards, key=lambda card: card.max_model_len, default=None)

    def update(
        self, scheduler: str, engines: Iterable[EngineStatus], *, draining: bool = False
    ) -> None:
        """Replace what `scheduler` last offered."""
        self._drop_engines(scheduler)
        for status in engines:
            place = Place(scheduler, status.engine_id)
            self._engines[place] = _Engine(status, self._own[place], draining)

    def drop(self, scheduler: str) -> list[int]:
        """The link to `scheduler` is gone. Returns the keys that were placed over it."""
        self._drop_engines(scheduler)
        keys = [key for key, place in self._places.items() if place.scheduler == scheduler]
        self.release(keys)
        return keys

    def choose(self, need: Need) -> Place | None:
        """The engine with the least load for its size among those that can serve `need`."""
        fitting = (
            place
            for place, engine in self._engines.items()
            if not engine.draining and need.met_by(engine.status.card)
        )
        return min(fitting, key=self._cost, default=None)

    def place(self, keys: Iterable[int], place: Place) -> None:
        for key in keys:
            self._places[key] = place
            self._own[place] += 1

    def release(self, keys: Iterable[int]) -> dict[str, list[int]]:
        """Forget `keys`. Returns those that were placed, by scheduler."""
        released: defaultdict[str, list[int]] = defaultdict(list)
        for key in keys:
            place = self._places.pop(key, None)
            if place is not None:
                self._own[place] -= 1
                if not self._own[place]:
                    del self._own[place]
                released[place.scheduler].append(key)
        return released

    def release_lost(self, place: Place, keys: Iterable[int]) -> list[int]:
        """Forget those of `keys` that are placed at `place`, and return them."""
        lost = [key for key in keys if self._places.get(key) == place]
        self.release(lost)
        return lost

    def _drop_engines(self, scheduler: str) -> None:
        for place in [place for place in self._engines if place.scheduler == scheduler]:
            del self._engines[place]

    def _cost(self, place: Place) -> tuple[float, Place]:
        """Requests per row of the batch: those reported, and our own since the report."""
        status, own_at_report, _ = self._engines[place]
        own = self._own[place]
        reported = status.stats.running + status.stats.waiting
        requests = max(own, reported + own - own_at_report)
        return requests / max(1, status.capacity.max_num_seqs), place

"""Which engine gets a request, and which engine has which: pure state, no I/O, no clock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from heapq import nlargest
from itertools import chain
from random import Random
from typing import Final, NamedTuple

from pagemesh.shared.engine_messages import Submit
from pagemesh.shared.hashing import split_hashes
from pagemesh.shared.messages import EngineStatus, ModelCard, Variant
from pagemesh.shared.step_stats import StepPace
from pagemesh.tokenizer_svc.cost import UNMEASURED, Load, Work, cost_s
from pagemesh.tokenizer_svc.recent import RecentBlocks
from pagemesh.tokenizer_svc.variants import card_of_name

FEW: Final = 8
"""So many engines are all considered."""
HOLDERS: Final = 2
DRAWN: Final = 2
"""Of more engines: those that hold most of the prompt, and others drawn by lot."""
PRESUMED_SHARE: Final = 0.5
"""Of a prompt, to be cached on the engine of its affinity, when nobody says who holds it."""


class Place(NamedTuple):
    """An engine, by the scheduler link it is reached over."""

    scheduler: str
    engine_id: str


class _Limits(NamedTuple):
    """Of a model card: what decides whether its engine fits."""

    block_tokens: int
    max_model_len: int
    variant: Variant


class Need(NamedTuple):
    """What an engine must offer for some choices of one request."""

    block_tokens: int
    total_tokens: int
    variant: Variant

    @classmethod
    def of(cls, submits: Sequence[Submit], card: ModelCard) -> Need:
        """The block size is the one that the hashes were made with."""
        prompt_tokens = len(submits[0].prompt_ids) // 4
        answers = (submit.params.max_tokens or 0 for submit in submits)
        return cls(card.block_tokens, prompt_tokens + max(answers), card.variant)

    def met_by(self, limits: _Limits) -> bool:
        same = (limits.block_tokens, limits.variant) == (self.block_tokens, self.variant)
        return same and limits.max_model_len >= self.total_tokens


class Ask(NamedTuple):
    """What the choice of an engine depends on, of choices that start together.

    `hashes` are those of the full blocks known, none where the cache is not read. Requests of one
    `affinity` belong on one engine: `hinted` if the client says so, else if they begin alike.
    """

    need: Need
    known_tokens: int
    hashes: Sequence[bytes] = ()
    answer_tokens: int = 0
    choices: int = 1
    affinity: bytes = b""
    hinted: bool = False

    @classmethod
    def of(cls, submits: Sequence[Submit], card: ModelCard, cache_key: str = "") -> Ask:
        first = submits[0]
        reads_cache = first.params.prompt_logprobs is None
        hashes = split_hashes(first.hashes) if reads_cache else []
        prior_tokens = len(first.prior_ids) // 4
        return cls(
            need=Need.of(submits, card),
            known_tokens=len(first.prompt_ids) // 4 + prior_tokens,
            hashes=hashes,
            answer_tokens=max(0, (first.params.max_tokens or 0) - prior_tokens),
            choices=len(submits),
            affinity=cache_key.encode() or b"".join(hashes[:1]),
            hinted=bool(cache_key),
        )

    def uncached_tokens(self, blocks: float) -> float:
        """That are left when the first `blocks` are cached. One is always computed."""
        return max(1.0, self.known_tokens - blocks * self.need.block_tokens)


Depths = Mapping[int, int]
"""How many leading blocks of a chain engines hold, by their number in the prefix index."""


class Chosen(NamedTuple):
    """`cached_blocks` of the prompt are there, or on their way."""

    place: Place
    cached_blocks: int


class _Engine(NamedTuple):
    """`own` of what it reports is ours."""

    status: EngineStatus
    own: Load
    draining: bool


class _Placed(NamedTuple):
    place: Place
    prefill_tokens: float


class Dispatch:
    """The engines that schedulers offer, and the keys placed on them by this service.

    An engine that left its scheduler's list takes nothing new; its keys stay placed until the
    scheduler says they are lost, or its link ends.
    """

    def __init__(self, lots: Random | None = None) -> None:
        self._lots = Random() if lots is None else lots
        self._engines: dict[Place, _Engine] = {}
        self._offers: dict[_Limits, list[Place]] = {}
        self._mean_pace: StepPace | None = None
        self._placed: dict[int, _Placed] = {}
        self._own_requests: Counter[Place] = Counter()
        self._own_prefill: defaultdict[Place, float] = defaultdict(float)
        self._recent: dict[Place, RecentBlocks] = {}
        self._cards: dict[str, ModelCard | None] = {}
        """What `card` found, until the engines change."""

    def statuses(self) -> list[EngineStatus]:
        return [engine.status for engine in self._engines.values()]

    def card(self, name: str) -> ModelCard | None:
        """The card that requests for the model `name` are checked against."""
        if name not in self._cards:
            engines = [engine for engine in self._engines.values() if not engine.draining]
            self._cards[name] = card_of_name(name, [engine.status.card for engine in engines])
        return self._cards[name]

    def update(
        self, scheduler: str, engines: Iterable[EngineStatus], *, draining: bool = False
    ) -> None:
        """Replace what `scheduler` last offered."""
        before = self._take_engines(scheduler)
        for status in engines:
            place = Place(scheduler, status.engine_id)
            engine = self._engines[place] = _Engine(status, self._own(place), draining)
            if place not in before or not _offers_alike(before.pop(place), engine):
                self._forget_sums()
        for place in before:
            self._recent.pop(place, None)
            self._forget_sums()
        self._mean_pace = None

    def drop(self, scheduler: str) -> list[int]:
        """The link to `scheduler` is gone. Returns the keys that were placed over it."""
        for place in self._take_engines(scheduler):
            self._recent.pop(place, None)
        self._forget_sums()
        keys = [key for key, (place, _) in self._placed.items() if place.scheduler == scheduler]
        self.release(keys)
        return keys

    def _forget_sums(self) -> None:
        """What decisions need of all engines: there are many more of them than changes."""
        self._offers = {}
        self._cards = {}
        self._mean_pace = None

    def _offered(self) -> dict[_Limits, list[Place]]:
        if not self._offers:
            for place, (status, _, draining) in self._engines.items():
                if not draining:
                    card = status.card
                    limits = _Limits(card.block_tokens, card.max_model_len, card.variant)
                    self._offers.setdefault(limits, []).append(place)
        return self._offers

    def _common_pace(self) -> StepPace:
        if self._mean_pace is None:
            paces = (engine.status.stats.pace for engine in self._engines.values())
            self._mean_pace = _mean_pace(paces)
        return self._mean_pace

    # -- the decision: pure ------------------------------------------------------------------------

    def candidates(self, need: Need) -> list[Place]:
        """Engines that can serve `need`."""
        fitting = [places for limits, places in self._offered().items() if need.met_by(limits)]
        return fitting[0] if len(fitting) == 1 else [*chain.from_iterable(fitting)]

    def choose(self, ask: Ask, depths: Depths | None, now_s: float) -> Chosen | None:
        """The engine on which `ask` costs least. `depths`: the index's answer, None without one."""
        places = self.candidates(ask.need)
        if not places:
            return None
        cached = self._cached_blocks(places, ask, depths, now_s)
        rank = _ranks(ask.affinity)
        unknown = not cached and _may_be_unknown(ask, depths)
        favourite = max(places, key=rank) if unknown else None
        costs = {
            place: self._cost_s(ask, place, cached.get(place, 0), presumed=place == favourite)
            for place in self._considered(places, cached, favourite)
        }
        least = min(costs.values())
        place = max((each for each, cost in costs.items() if cost == least), key=rank)
        return Chosen(place, cached.get(place, 0))

    def _cached_blocks(
        self, places: Iterable[Place], ask: Ask, depths: Depths | None, now_s: float
    ) -> dict[Place, int]:
        """Leading blocks of the prompt, at the places that hold some or are about to."""
        cached: dict[Place, int] = {}
        if not ask.hashes:
            return cached
        for place in places:
            recent = self._recent.get(place)
            blocks = recent.depth(ask.hashes, now_s) if recent is not None else 0
            if depths:
                number = self._engines[place].status.stats.index_number
                blocks = max(blocks, depths.get(number, 0))
            if blocks:
                cached[place] = blocks
        return cached

    def _considered(
        self, places: Sequence[Place], cached: Mapping[Place, int], favourite: Place | None
    ) -> Iterable[Place]:
        """Services that were told the same, a while ago, would all choose the one engine that was
        best then, and each look would take longer the more there are. Lots prevent both
        (Mitzenmacher, How useful is old information?, 2000)."""
        if len(places) <= FEW:
            return places
        lot = self._lots.random
        deepest = nlargest(HOLDERS, cached, key=lambda place: (cached[place], lot()))
        hoped = [favourite] if favourite is not None else []
        return [*deepest, *hoped, *self._lots.sample(places, DRAWN)]

    def _cost_s(self, ask: Ask, place: Place, cached_blocks: int, *, presumed: bool) -> float:
        """`presumed`: a share of the prompt is there as well."""
        uncached_tokens = ask.uncached_tokens(cached_blocks)
        if presumed:
            uncached_tokens *= 1 - PRESUMED_SHARE
        status = self._engines[place].status
        pace = status.stats.pace if status.stats.pace.token_s else self._common_pace()
        work = Work(uncached_tokens, ask.answer_tokens, ask.choices)
        return cost_s(work, self.load(place), status.capacity, pace)

    def load(self, place: Place) -> Load:
        """What the engine has reported, and our own since: the report may not know of it yet."""
        status, at_report, _ = self._engines[place]
        own, stats = self._own(place), status.stats
        reported = stats.running + stats.waiting
        return Load(
            max(own.requests, reported + own.requests - at_report.requests),
            max(
                own.prefill_tokens,
                stats.prefill_tokens + own.prefill_tokens - at_report.prefill_tokens,
            ),
        )

    def _own(self, place: Place) -> Load:
        return Load(self._own_requests[place], self._own_prefill.get(place, 0.0))

    def forget_cached(self, name: str) -> list[Place]:
        """The engines of the model `name`, which hold nothing of late any more."""
        places = [p for p, engine in self._engines.items() if name in engine.status.card.names]
        for place in places:
            self._recent.pop(place, None)
        return places

    # -- placements --------------------------------------------------------------------------------

    def place(self, keys: Iterable[int], ask: Ask, chosen: Chosen, now_s: float) -> None:
        """`keys` are the choices of `ask`; the first one computes the prompt for all."""
        place, cached_blocks = chosen
        prefill_tokens = ask.uncached_tokens(cached_blocks)
        for key in keys:
            self._placed[key] = _Placed(place, prefill_tokens)
            self._own_requests[place] += 1
            self._own_prefill[place] += prefill_tokens
            prefill_tokens = 0.0
        self._remember(place, ask.hashes, now_s)

    def _remember(self, place: Place, hashes: Sequence[bytes], now_s: float) -> None:
        engine = self._engines.get(place)
        if engine is not None and hashes:
            limit_blocks = engine.status.capacity.num_blocks
            self._recent.setdefault(place, RecentBlocks(limit_blocks)).add(hashes, now_s)

    def begun(self, keys: Iterable[int]) -> None:
        """The prompts of `keys` are computed."""
        for key in keys:
            placed = self._placed.get(key)
            if placed is not None:
                self._take_off(placed.place, placed.prefill_tokens)
                self._placed[key] = placed._replace(prefill_tokens=0.0)

    def release(self, keys: Iterable[int]) -> dict[str, list[int]]:
        """Forget `keys`. Returns those that were placed, by scheduler."""
        released: defaultdict[str, list[int]] = defaultdict(list)
        for key in keys:
            placed = self._placed.pop(key, None)
            if placed is not None:
                self._own_requests[placed.place] -= 1
                self._take_off(placed.place, placed.prefill_tokens)
                released[placed.place.scheduler].append(key)
        return released

    def release_lost(self, place: Place, keys: Iterable[int]) -> list[int]:
        """Forget those of `keys` that are placed at `place`, and return them."""
        lost = [key for key in keys if key in self._placed and self._placed[key].place == place]
        self.release(lost)
        return lost

    def _take_off(self, place: Place, prefill_tokens: float) -> None:
        self._own_prefill[place] -= prefill_tokens
        if not self._own_requests[place]:
            del self._own_requests[place]
            self._own_prefill.pop(place, None)

    def _take_engines(self, scheduler: str) -> dict[Place, _Engine]:
        places = [place for place in self._engines if place.scheduler == scheduler]
        return {place: self._engines.pop(place) for place in places}


def _offers_alike(one: _Engine, other: _Engine) -> bool:
    same_card = one.status.card == other.status.card
    return same_card and one.draining == other.draining


def _may_be_unknown(ask: Ask, depths: Depths | None) -> bool:
    """That nobody is known to hold anything means little if the index is silent, or the client
    knows better."""
    return ask.hinted or (depths is None and bool(ask.affinity))


def _mean_pace(paces: Iterable[StepPace]) -> StepPace:
    """Of those measured, for engines that have computed nothing yet."""
    known = [pace for pace in paces if pace.token_s]
    if not known:
        return UNMEASURED
    overhead_s, token_s = (sum(values) / len(known) for values in zip(*known, strict=True))
    return StepPace(overhead_s, token_s)


def _ranks(affinity: bytes) -> Callable[[Place], int]:
    """Rendezvous hashing: every service ranks the engines alike for one affinity, and an engine
    that comes or goes moves only what is its own (Thaler and Ravishankar, 1998)."""

    def rank(place: Place) -> int:
        digest = blake2b(affinity + place.engine_id.encode(), digest_size=8, key=b"affinity")
        return int.from_bytes(digest.digest(), "little")

    return rank

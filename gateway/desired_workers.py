"""How many workers a model needs, for whoever starts and stops them. Pure: no I/O, no clock.

Every gateway decides alike, from what all engines report. One that has just started asks for no
fewer than there are, so of several gateways the largest figure holds.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from pagemesh.shared.messages import EngineStatus

FULL: Final = 0.8
"""The share of a worker's batch, KV pool or pace that is to be used."""
LONG_QUEUE_S: Final = 1.0
"""A shorter queue is no reason for more workers."""
CATCH_UP_S: Final = 30.0
"""In which a longer one is to be gone."""
UP_AFTER_S: Final = 3.0
"""For which more must be wanted: a worker takes time to start, and a burst may be over by then."""
PACE_OVER_S: Final = 3.0
SAME_PACE: Final = 0.9
"""So much of a pace is that pace, when it is asked whether a number of workers suffices."""


class Demand(NamedTuple):
    """What the engines of one model have to do, all together.

    `batches` are the full batches of a worker that its requests (running and waiting) make, `pools`
    the KV pools that they fill, `queue_s` the seconds that one worker alone would take for the
    queues, `pace` the tokens computed in a second.
    """

    workers: int
    requests: int
    batches: float
    pools: float
    queue_s: float
    pace: float = 0.0


def demand_of(engines: Sequence[EngineStatus], pace: float = 0.0) -> Demand:
    """Of one model's engines, at least one."""
    requests = [engine.stats.running + engine.stats.waiting for engine in engines]
    rows = max(1, sum(engine.capacity.max_num_seqs for engine in engines))
    return Demand(
        len(engines),
        sum(requests),
        batches=sum(requests) * len(engines) / rows,
        # Who waits will want as much of the pool as those who run.
        pools=sum(
            engine.stats.kv_usage * each / max(1, engine.stats.running)
            for engine, each in zip(engines, requests, strict=True)
        ),
        queue_s=sum(engine.stats.queue_s for engine in engines),
        pace=pace,
    )


def wanted_workers(demand: Demand) -> int:
    """Enough for the batch, for the KV pool and for the queue, each by itself; 1 to `requests`."""
    needs = [demand.batches / FULL, demand.pools / FULL]
    if demand.queue_s > LONG_QUEUE_S * demand.workers:
        needs.append(demand.workers + demand.queue_s / CATCH_UP_S)
    return max(1, min(demand.requests, math.ceil(max(needs))))


class _Largest:
    """Of the values of the last `window_s`, where each holds until the next one comes. Remembers
    only those that may yet be it."""

    def __init__(self, window_s: float, value: float) -> None:
        self._window_s = window_s
        self._last = value
        self._seen: deque[tuple[float, float]] = deque()

    def update(self, value: float, now_s: float) -> float:
        for each in (self._last, value):
            while self._seen and self._seen[-1][1] <= each:
                self._seen.pop()
            self._seen.append((now_s, each))
        self._last = value
        while self._seen[0][0] < now_s - self._window_s:
            self._seen.popleft()
        return self._seen[0][1]


class Steady:
    """A figure that does not flap: it goes up to what was wanted at least for all of UP_AFTER_S,
    and down to what was wanted at most for all of `down_after_s`."""

    def __init__(self, value: int, down_after_s: float, now_s: float) -> None:
        self.value = value
        self._largest = _Largest(down_after_s, value)
        self._least = _Largest(UP_AFTER_S, -value)
        self.update(value, now_s)

    def update(self, wanted: int, now_s: float) -> int:
        ceiling = int(self._largest.update(wanted, now_s))
        floor = -int(self._least.update(-wanted, now_s))
        self.value = max(floor, min(self.value, ceiling))
        return self.value


class _Model:
    """Of one model: the figure, and what it is to be decided from next time."""

    def __init__(self, engines: Sequence[EngineStatus], down_after_s: float, now_s: float) -> None:
        self.steady = Steady(len(engines), down_after_s, now_s)
        self._tokens = _tokens_by_engine(engines)
        self._now_s = now_s
        self._pace = 0.0
        self._too_few: dict[int, float] = {}
        """Numbers of workers that let a queue grow, and the least pace of all at which they did."""

    def update(self, engines: Sequence[EngineStatus], now_s: float) -> None:
        self._note_pace(engines, now_s)
        demand = demand_of(engines, self._pace)
        before = self.steady.value
        wanted = max(wanted_workers(demand), self._known_to_need(demand))
        self.steady.update(wanted, now_s)
        if self.steady.value > before and demand.queue_s > 0:
            known = self._too_few.get(demand.workers, demand.pace)
            self._too_few[demand.workers] = min(known, demand.pace)

    def _known_to_need(self, demand: Demand) -> int:
        """Of the workers there are, more than have been too few at the present pace: a queue that
        more have done away with would be back without them. That asks for no new worker, since
        other requests may be served at another pace."""
        too_few = [n for n, pace in self._too_few.items() if demand.pace >= SAME_PACE * pace]
        return min(demand.workers, max(too_few, default=0) + 1)

    def _note_pace(self, engines: Sequence[EngineStatus], now_s: float) -> None:
        """Smoothed. An engine that began anew counts from its next report on."""
        tokens, before = _tokens_by_engine(engines), self._tokens
        elapsed_s = max(now_s - self._now_s, 1e-3)
        gained = sum(max(0.0, n - before.get(name, n)) for name, n in tokens.items())
        weight = 1 - math.exp(-elapsed_s / PACE_OVER_S)
        self._pace += weight * (gained / elapsed_s - self._pace)
        self._tokens, self._now_s = tokens, now_s


class DesiredWorkers:
    """The figures by model. One that lost all its engines keeps its figure: what nobody knows
    starts and stops nothing."""

    def __init__(self, down_after_s: float) -> None:
        self._down_after_s = down_after_s
        self._models: dict[str, _Model] = {}

    def update(self, engines: Iterable[EngineStatus], now_s: float) -> None:
        """Take in what the live engines report. Call it every second or so."""
        by_model: defaultdict[str, list[EngineStatus]] = defaultdict(list)
        for engine in engines:
            by_model[engine.card.names[0]].append(engine)
        for name, its_engines in by_model.items():
            if name not in self._models:
                self._models[name] = _Model(its_engines, self._down_after_s, now_s)
            self._models[name].update(its_engines, now_s)

    def by_model(self) -> Mapping[str, int]:
        return {name: model.steady.value for name, model in self._models.items()}


def _tokens_by_engine(engines: Iterable[EngineStatus]) -> dict[str, float]:
    return {engine.engine_id: engine.stats.steps.tokens.total for engine in engines}

"""How many workers are asked for: monotone in load, bounded, and steady when the load is."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Final

import hypothesis
import pytest
from gateway_fakes import CARD, engine
from hypothesis import given
from hypothesis import strategies as st

from pagemesh.gateway.desired_workers import (
    CATCH_UP_S,
    UP_AFTER_S,
    Demand,
    DesiredWorkers,
    Steady,
    demand_of,
    wanted_workers,
)
from pagemesh.shared.distribution import Distribution
from pagemesh.shared.messages import Capacity, EngineStats, EngineStatus
from pagemesh.shared.step_stats import StepStats

DOWN_AFTER_S: Final = 60.0
ROWS: Final = 10
CAPACITY: Final = Capacity(101, ROWS, 512, 1024, "cpu")

loads = st.floats(0, 1000)
demands = st.builds(
    Demand,
    workers=st.integers(1, 64),
    requests=st.integers(0, 10_000),
    batches=loads,
    pools=loads,
    queue_s=loads,
    pace=loads,
)


@given(demands)
def test_it_is_bounded_by_one_and_by_the_requests(demand: Demand) -> None:
    assert 1 <= wanted_workers(demand) <= max(1, demand.requests)


@given(demands, demands)
def test_more_load_of_any_kind_never_asks_for_fewer(one: Demand, other: Demand) -> None:
    less = Demand(one.workers, *map(min, one[1:], other[1:]))
    more = Demand(one.workers, *map(max, one[1:], other[1:]))
    assert wanted_workers(less) <= wanted_workers(more)


@pytest.mark.parametrize(
    ("demand", "wanted"),
    [
        (Demand(1, 0, 0, 0, 0), 1),
        (Demand(1, 8, 0.8, 0.1, 0), 1),
        (Demand(1, 9, 0.9, 0.1, 0), 2),
        (Demand(1, 9, 0.1, 0.9, 0), 2),
        (Demand(1, 1, 0.1, 1.0, 0), 1),  # one request makes no use of two
        (Demand(2, 50, 0.1, 0.1, 2.0), 1),  # a second each
        (Demand(2, 50, 0.1, 0.1, CATCH_UP_S), 3),
        (Demand(2, 50, 0.1, 0.1, 4 * CATCH_UP_S), 6),
    ],
)
def test_what_each_need_asks_for(demand: Demand, wanted: int) -> None:
    assert wanted_workers(demand) == wanted


def status(number: int = 1, tokens: float = 0, **stats: float) -> EngineStatus:
    steps = StepStats(tokens=Distribution(total=tokens))
    counts = EngineStats(**{**stats, "steps": steps})  # type: ignore[arg-type]
    return EngineStatus(f"engine-{number}", CARD, CAPACITY, counts)


def test_a_demand_is_that_of_all_engines_together() -> None:
    engines = [
        status(1, running=5, waiting=5, kv_usage=0.5, queue_s=2.0),
        status(2, running=5, kv_usage=0.25),
        status(3),
    ]
    assert demand_of(engines) == Demand(3, 15, batches=1.5, pools=1.25, queue_s=2.0)


# -- in time --------------------------------------------------------------------------------------


def test_up_after_a_moment_and_down_after_a_calm_period() -> None:
    steady = Steady(1, DOWN_AFTER_S, now_s=0.0)
    burst = [steady.update(wanted, now_s) for now_s, wanted in ((1.0, 5), (2.0, 5), (3.0, 1))]
    assert burst == [1, 1, 1]
    up = [(steady.update(4, 10.0 + tick), tick) for tick in range(6)]
    assert next(tick for value, tick in up if value == 4) == UP_AFTER_S + 1
    down = [(steady.update(2, 16.0 + tick), tick) for tick in range(70)]
    assert next(tick for value, tick in down if value == 2) == DOWN_AFTER_S + 1
    assert {value for value, _ in down} == {4, 2}


@given(st.lists(st.integers(1, 50), min_size=1, max_size=300), st.integers(1, 50))
def test_a_figure_stays_within_what_was_wanted_lately(wanted: list[int], first: int) -> None:
    steady = Steady(first, DOWN_AFTER_S, now_s=0.0)
    history = [first]
    for now_s, each in enumerate(wanted, 1):
        before = steady.value
        history.append(each)
        value = steady.update(each, float(now_s))
        if value < before:
            assert max(history[-2 - int(DOWN_AFTER_S) :]) <= value
        if value > before:
            assert min(history[-2 - int(UP_AFTER_S) :]) >= value


class Served:
    """A model under a constant load: `streams` requests at a time, `tokens_per_s` of new prompts,
    of which a worker computes `PACE`. Workers follow the figure at once."""

    PACE: Final = 100.0

    def __init__(self, streams: int, tokens_per_s: float, workers: int) -> None:
        self.desired = DesiredWorkers(DOWN_AFTER_S)
        self.figures: list[int] = []
        self._streams, self._load = streams, tokens_per_s
        self._workers, self._now_s, self._backlog = workers, 0.0, 0.0
        self._tokens = dict.fromkeys(range(1, 1000), 0.0)

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self._now_s += 1.0
            capacity = self.PACE * self._workers
            done = min(self._backlog + self._load, capacity)
            self._backlog += self._load - done
            engines = [self._engine(number, done) for number in range(1, self._workers + 1)]
            self.desired.update(engines, self._now_s)
            [self._workers] = self.desired.by_model().values()
            self.figures.append(self._workers)

    def _engine(self, number: int, done: float) -> EngineStatus:
        self._tokens[number] += done / self._workers
        streams = math.ceil(self._streams / self._workers)
        running = min(ROWS, max(streams, 1 if done else 0))
        waiting = math.ceil(self._backlog / self._workers / 10)
        queue_s = self._backlog / self._workers / self.PACE
        return status(
            number, self._tokens[number], running=running, waiting=waiting, queue_s=queue_s
        )


@hypothesis.settings(max_examples=25)
@given(st.integers(0, 60), st.floats(0, 800), st.integers(1, 12))
def test_a_constant_load_makes_it_settle_and_stay(
    streams: int, tokens_per_s: float, workers: int
) -> None:
    served = Served(streams, tokens_per_s, workers)
    served.run(900)
    # A load of a little more than the workers' pace shows late, as a queue.
    assert served.figures[600:] == sorted(served.figures[600:])
    turns = [now - then for now, then in zip(served.figures[1:], served.figures, strict=False)]
    directions = [turn > 0 for turn in turns if turn]
    assert [up for up, _ in groupby(directions)].count(True) <= 2
    assert served.figures[-1] * Served.PACE >= tokens_per_s


# -- by model -------------------------------------------------------------------------------------


def test_each_model_has_a_figure_and_keeps_it_when_its_engines_are_gone() -> None:
    desired = DesiredWorkers(DOWN_AFTER_S)
    other = engine("other", CARD._replace(names=["other"]))
    engines = [status(1, running=9), other._replace(capacity=CAPACITY)]
    for now_s in range(10):
        desired.update(engines, float(now_s))
    figures = {CARD.names[0]: 2, other.card.names[0]: 1}
    assert desired.by_model() == figures
    desired.update([], 1000.0)
    assert desired.by_model() == figures


def test_a_gateway_that_has_just_started_asks_for_no_fewer_than_there_are() -> None:
    desired = DesiredWorkers(DOWN_AFTER_S)
    for now_s in (0.0, DOWN_AFTER_S - 1):
        desired.update([status(1), status(2), status(3)], now_s)
        assert [*desired.by_model().values()] == [3]
    desired.update([status(1), status(2), status(3)], DOWN_AFTER_S + 1)
    assert [*desired.by_model().values()] == [1]

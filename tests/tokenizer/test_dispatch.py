"""The choice of an engine and the table of what is where."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from scripts import CAPACITY

from pagemesh.shared.engine_messages import Submit
from pagemesh.shared.messages import EngineStats, EngineStatus, ModelCard
from pagemesh.shared.sampling import SamplingParams
from pagemesh.tokenizer_svc.dispatch import Dispatch, Need, Place

CARD = ModelCard(["m"], 100, 64, 16, "float32", [2], 1, "f00d", 1)
NEED = Need(16, 10)


def engine(name: str, card: ModelCard = CARD, *, rows: int = 4, load: int = 0) -> EngineStatus:
    return EngineStatus(name, card, CAPACITY._replace(max_num_seqs=rows), EngineStats(running=load))


def test_nothing_is_chosen_among_nothing() -> None:
    assert Dispatch().choose(NEED) is None
    assert Dispatch().card() is None


def test_the_least_loaded_engine_for_its_size_is_chosen() -> None:
    dispatch = Dispatch()
    dispatch.update("s", [engine("small", rows=2, load=1), engine("large", rows=8, load=3)])
    assert dispatch.choose(NEED) == Place("s", "large")


def test_requests_placed_since_the_report_count() -> None:
    dispatch = Dispatch()
    dispatch.update("s", [engine("a", load=1), engine("b")])
    chosen = []
    for key in range(5):
        place = dispatch.choose(NEED)
        assert place is not None
        dispatch.place([key], place)
        chosen.append(place.engine_id)
    assert sorted(chosen) == ["a", "a", "b", "b", "b"]


def test_a_report_replaces_the_guess() -> None:
    dispatch = Dispatch()
    dispatch.update("s", [engine("a"), engine("b")])
    dispatch.place([1, 2], Place("s", "a"))
    dispatch.update("s", [engine("a", load=2), engine("b", load=3)])
    assert dispatch.choose(NEED) == Place("s", "a")
    dispatch.release([1])
    dispatch.place([3], Place("s", "a"))
    assert dispatch.choose(NEED) == Place("s", "a")


@pytest.mark.parametrize(
    ("card", "fits"),
    [
        (CARD, True),
        (CARD._replace(max_model_len=10), True),
        (CARD._replace(max_model_len=9), False),
        (CARD._replace(block_tokens=32), False),
    ],
)
def test_an_engine_must_fit_the_request(card: ModelCard, fits: bool) -> None:
    dispatch = Dispatch()
    dispatch.update("s", [engine("a", card)])
    assert (dispatch.choose(NEED) is not None) == fits


def test_need_counts_prompt_and_answer() -> None:
    params = SamplingParams(max_tokens=7, seed=1)
    submit = Submit(1, "r", 1, "", bytes(4 * 5), b"", 1, params, b"")
    assert Need.of([submit], CARD) == Need(16, 12)


def test_the_card_is_of_the_longest_context() -> None:
    dispatch = Dispatch()
    long = CARD._replace(max_model_len=99)
    dispatch.update("s", [engine("a"), engine("b", long)])
    assert dispatch.card() == long
    dispatch.update("s", [engine("a"), engine("b", long)], draining=True)
    assert dispatch.card() is None


def test_an_engine_that_left_the_list_keeps_its_keys_until_lost() -> None:
    dispatch = Dispatch()
    dispatch.update("s", [engine("a")])
    dispatch.place([1, 2], Place("s", "a"))
    dispatch.update("s", [])
    assert dispatch.choose(NEED) is None
    assert dispatch.release([2]) == {"s": [2]}
    assert dispatch.release_lost(Place("s", "a"), [1, 2, 3]) == [1]
    assert dispatch.release_lost(Place("s", "a"), [1]) == []


class Bookkeeping(RuleBasedStateMachine):
    """Against a plain dictionary: every placed key is handed back exactly once."""

    keys = Bundle("keys")

    def __init__(self) -> None:
        super().__init__()
        self.dispatch = Dispatch()
        self.placed: dict[int, Place] = {}
        self.last_key = 0
        self.offered: set[Place] = set()

    @rule(scheduler=st.sampled_from("st"), names=st.sets(st.sampled_from("abc")))
    def report(self, scheduler: str, names: set[str]) -> None:
        places = [Place(scheduler, name) for name in sorted(names)]
        load = Counter(self.placed.values())
        self.dispatch.update(scheduler, [engine(p.engine_id, load=load[p]) for p in places])
        self.offered = {p for p in self.offered if p.scheduler != scheduler} | set(places)

    @rule(target=keys)
    def submit(self) -> int:
        self.last_key += 1
        place = self.dispatch.choose(NEED)
        if place is not None:
            self.dispatch.place([self.last_key], place)
            self.placed[self.last_key] = place
        return self.last_key

    @rule(key=keys)
    def done(self, key: int) -> None:
        place = self.placed.pop(key, None)
        expected = {} if place is None else {place.scheduler: [key]}
        assert self.dispatch.release([key]) == expected

    @rule(scheduler=st.sampled_from("st"), name=st.sampled_from("abc"))
    def lost(self, scheduler: str, name: str) -> None:
        gone = [key for key, place in self.placed.items() if place == (scheduler, name)]
        every_key = range(1, self.last_key + 1)
        assert self.dispatch.release_lost(Place(scheduler, name), every_key) == gone
        self.placed = {k: p for k, p in self.placed.items() if k not in gone}

    @rule(scheduler=st.sampled_from("st"))
    def link_down(self, scheduler: str) -> None:
        gone = [key for key, place in self.placed.items() if place.scheduler == scheduler]
        assert self.dispatch.drop(scheduler) == gone
        self.offered = {p for p in self.offered if p.scheduler != scheduler}
        self.placed = {k: p for k, p in self.placed.items() if k not in gone}

    @invariant()
    def load_is_even_between_equal_engines(self) -> None:
        """Whatever was reported, the next choice is never fuller than another engine."""
        place = self.dispatch.choose(NEED)
        if place is None:
            return
        load = Counter(self.placed.values())
        assert load[place] == min(load[at] for at in self.offered)


TestBookkeeping = Bookkeeping.TestCase

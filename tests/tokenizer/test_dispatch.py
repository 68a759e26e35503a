"""The choice of an engine and the table of what is where."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from scripts import CAPACITY

from pagemesh.shared.engine_messages import Submit
from pagemesh.shared.messages import EngineStats, EngineStatus, ModelCard
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.step_stats import StepPace
from pagemesh.tokenizer_svc.dispatch import Ask, Chosen, Dispatch, Need, Place
from pagemesh.tokenizer_svc.recent import RECENT_S, RecentBlocks

CARD = ModelCard(["m"], 100, 64, 16, "float32", [2], 1, "f00d", 1)
NEED = Need(16, 10, CARD.variant)
ASK = Ask(NEED, known_tokens=8, answer_tokens=2)


def choose(dispatch: Dispatch, ask: Ask = ASK) -> Place | None:
    chosen = dispatch.choose(ask, {}, 0.0)
    return None if chosen is None else chosen.place


def put(dispatch: Dispatch, keys: list[int], place: Place) -> None:
    dispatch.place(keys, ASK, Chosen(place, 0), 0.0)


def engine(name: str, card: ModelCard = CARD, *, rows: int = 4, load: int = 0) -> EngineStatus:
    return EngineStatus(name, card, CAPACITY._replace(max_num_seqs=rows), EngineStats(running=load))


def test_nothing_is_chosen_among_nothing() -> None:
    assert choose(Dispatch()) is None
    assert Dispatch().card("m") is None


def test_the_least_loaded_engine_is_chosen_unless_its_batch_is_full() -> None:
    dispatch = Dispatch()
    dispatch.update("s", [engine("small", rows=2, load=1), engine("large", rows=8, load=3)])
    assert choose(dispatch) == Place("s", "small")
    dispatch.update("s", [engine("small", rows=2, load=2), engine("large", rows=8, load=3)])
    assert choose(dispatch) == Place("s", "large")


def test_requests_placed_since_the_report_count() -> None:
    dispatch = Dispatch()
    dispatch.update("s", [engine("a", load=1), engine("b")])
    chosen = []
    for key in range(5):
        place = choose(dispatch)
        assert place is not None
        put(dispatch, [key], place)
        chosen.append(place.engine_id)
    assert sorted(chosen) == ["a", "a", "b", "b", "b"]


def test_a_report_replaces_the_guess() -> None:
    dispatch = Dispatch()
    dispatch.update("s", [engine("a"), engine("b")])
    put(dispatch, [1, 2], Place("s", "a"))
    dispatch.begun([1, 2])
    dispatch.update("s", [engine("a", load=2), engine("b", load=3)])
    assert choose(dispatch) == Place("s", "a")
    dispatch.release([1])
    put(dispatch, [3], Place("s", "a"))
    dispatch.begun([3])
    assert choose(dispatch) == Place("s", "a")


@pytest.mark.parametrize(
    ("card", "fits"),
    [
        (CARD, True),
        (CARD._replace(max_model_len=10), True),
        (CARD._replace(max_model_len=9), False),
        (CARD._replace(block_tokens=32), False),
        (CARD._replace(fingerprint="beef"), False),
        (CARD._replace(dtype="bfloat16"), False),
        (CARD._replace(quantization="int8"), False),
    ],
)
def test_an_engine_must_fit_the_request(card: ModelCard, fits: bool) -> None:
    dispatch = Dispatch()
    dispatch.update("s", [engine("a", card)])
    assert (choose(dispatch) is not None) == fits


def test_need_counts_prompt_and_answer() -> None:
    params = SamplingParams(max_tokens=7, seed=1)
    submit = Submit(1, "r", 1, "", bytes(4 * 5), b"", 1, params, b"")
    assert Need.of([submit], CARD) == Need(16, 12, CARD.variant)


def test_the_card_is_of_the_longest_context() -> None:
    dispatch = Dispatch()
    long = CARD._replace(max_model_len=99)
    dispatch.update("s", [engine("a"), engine("b", long)])
    assert dispatch.card("m") == long
    dispatch.update("s", [engine("a"), engine("b", long)], draining=True)
    assert dispatch.card("m") is None


def test_an_engine_that_left_the_list_keeps_its_keys_until_lost() -> None:
    dispatch = Dispatch()
    dispatch.update("s", [engine("a")])
    put(dispatch, [1, 2], Place("s", "a"))
    dispatch.update("s", [])
    assert choose(dispatch) is None
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
        place = choose(self.dispatch)
        if place is not None:
            put(self.dispatch, [self.last_key], place)
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
        place = choose(self.dispatch)
        if place is None:
            return
        load = Counter(self.placed.values())
        assert load[place] == min(load[at] for at in self.offered)


TestBookkeeping = Bookkeeping.TestCase


CHAIN = [bytes([number]) * 16 for number in range(20)]
LONG = Ask(NEED, known_tokens=325, hashes=CHAIN, answer_tokens=64, affinity=CHAIN[0])
ROOMY = CAPACITY._replace(max_num_seqs=32, max_num_batched_tokens=8192)
A, B = Place("s", "a"), Place("s", "b")


def indexed(name: str, number: int, **stats: Any) -> EngineStatus:
    return EngineStatus(name, CARD, ROOMY, EngineStats(index_number=number, **stats))


def two_engines(**stats_of_b: Any) -> Dispatch:
    dispatch = Dispatch()
    dispatch.update("s", [indexed("a", 1), indexed("b", 2, **stats_of_b)])
    return dispatch


def test_who_holds_the_prefix_gets_the_request_until_waiting_costs_more() -> None:
    for running, place in ((0, B), (4, B), (5, A)):  # 64 tokens each beside 320 cached ones
        chosen = two_engines(running=running).choose(LONG, {2: 20, 7: 20}, 0.0)
        assert chosen == Chosen(place, 20 if place == B else 0)


def test_queued_prompt_tokens_cost_what_they_take() -> None:
    for queued_tokens, place in ((300, B), (330, A)):
        chosen = two_engines(prefill_tokens=queued_tokens).choose(LONG, {2: 20}, 0.0)
        assert chosen is not None
        assert chosen.place == place


def test_an_engine_of_another_number_holds_nothing() -> None:
    chosen = two_engines(running=1).choose(LONG, {7: 20}, 0.0)
    assert chosen == Chosen(A, 0)


def test_a_slow_engine_gets_less_though_it_has_the_prefix() -> None:
    fast, slow = StepPace(0.01, 0.0001), StepPace(0.01, 0.001)
    dispatch = Dispatch()
    dispatch.update("s", [indexed("a", 1, pace=fast), indexed("b", 2, pace=slow, running=1)])
    # 165 tokens in 16 ms on the fast one, 5 in 5 ms beside a row that costs 64 ms on the other.
    ask = LONG._replace(known_tokens=165)
    chosen = dispatch.choose(ask, {2: 10}, 0.0)
    assert chosen == Chosen(A, 0)
    dispatch.update("s", [indexed("a", 1, pace=fast), indexed("b", 2, pace=fast, running=1)])
    assert dispatch.choose(ask, {2: 10}, 0.0) == Chosen(B, 10)


def test_a_prompt_just_placed_counts_as_cached_until_it_is_old() -> None:
    dispatch = two_engines()
    dispatch.place([1], LONG, Chosen(B, 0), 0.0)
    dispatch.begun([1])
    longer = LONG._replace(known_tokens=400, hashes=[*CHAIN, b"next" * 4])
    assert dispatch.choose(longer, {}, RECENT_S) == Chosen(B, 20)
    dispatch.release([1])
    chosen = dispatch.choose(longer, {}, RECENT_S + 0.1)
    assert chosen is not None
    assert chosen.cached_blocks == 0


def test_what_an_engine_was_given_is_forgotten_with_the_engine() -> None:
    dispatch = two_engines()
    dispatch.place([1], LONG, Chosen(B, 0), 0.0)
    dispatch.update("s", [indexed("a", 1)])
    dispatch.update("s", [indexed("a", 1), indexed("b", 3)])
    chosen = dispatch.choose(LONG, {}, 0.0)
    assert chosen is not None
    assert chosen.cached_blocks == 0


def test_without_an_index_conversations_stick_by_their_beginning() -> None:
    """The favourite is presumed to hold half of the prompt, so two more rows move the request."""
    places = set()
    for number in range(32):
        root = bytes([number]) * 16
        ask = LONG._replace(hashes=[root, *CHAIN], affinity=root)
        chosen = two_engines().choose(ask, None, 0.0)
        assert chosen is not None
        places.add(chosen.place)
        for busy, place in ((1, chosen.place), (3, B if chosen.place == A else A)):
            dispatch = Dispatch()
            loads = {chosen.place: busy}
            dispatch.update("s", [indexed(p.engine_id, 0, running=loads.get(p, 0)) for p in (A, B)])
            assert dispatch.choose(ask, None, 0.0) == Chosen(place, 0)
    assert places == {A, B}


def test_a_cache_key_binds_requests_where_nothing_is_cached() -> None:
    for number in range(8):
        hint = f"user {number}".encode()
        first = two_engines().choose(LONG._replace(affinity=hint, hinted=True), {}, 0.0)
        assert first is not None
        busy = Dispatch()
        loads = {first.place: 1}
        busy.update(
            "s", [indexed(p.engine_id, i, running=loads.get(p, 0)) for i, p in enumerate((A, B), 1)]
        )
        other = LONG._replace(hashes=CHAIN[::-1], affinity=hint, hinted=True)
        assert busy.choose(other, {}, 0.0) == first
        # A hit counts more than a hint.
        holder = 1 if first.place == B else 2
        chosen = busy.choose(other, {holder: 20}, 0.0)
        assert chosen is not None
        assert chosen.place != first.place


def test_a_hot_prefix_overflows_and_is_then_in_two_places() -> None:
    """All at once: the prefix of 320 tokens is computed again when the first engine is behind."""
    dispatch = two_engines()
    placed = []
    for key in range(10):
        chosen = dispatch.choose(LONG, {1: 20}, 0.0)
        assert chosen is not None
        placed.append(chosen.place)
        dispatch.place([key], LONG, chosen, 0.0)
    assert placed[:5] == [A] * 5
    assert sorted(placed) == [A] * 7 + [B] * 3


def test_ask_knows_what_a_resumed_request_still_needs() -> None:
    params = SamplingParams(max_tokens=7, seed=1)
    submit = Submit(1, "r", 1, "", bytes(4 * 17), bytes(4 * 2), 1, params, CHAIN[0])
    ask = Ask.of([submit, submit], CARD)
    assert ask == Ask(Need(16, 24, CARD.variant), 19, [CHAIN[0]], 5, 2, CHAIN[0])
    assert Ask.of([submit], CARD, "key")[-2:] == (b"key", True)
    scored = submit._replace(params=SamplingParams(max_tokens=7, seed=1, prompt_logprobs=0))
    assert Ask.of([scored], CARD).hashes == []


@given(
    limit=st.integers(1, 12),
    placements=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(0, 9)), max_size=20
    ),
)
def test_recent_blocks_remember_prefixes(
    limit: int, placements: list[tuple[int, int, int]]
) -> None:
    """Halving finds what a walk finds, and the memory is bounded."""
    recent, now_s = RecentBlocks(limit), 0.0
    for chain, n_blocks, pause_s in placements:
        now_s += pause_s
        recent.add([bytes([chain, index]) for index in range(n_blocks)], now_s)
        assert len(recent) <= limit
        for other in range(4):
            hashes = [bytes([other, index]) for index in range(6)]
            walked = next((i for i in range(6) if not recent.depth([hashes[i]], now_s)), 6)
            assert recent.depth(hashes, now_s) == walked

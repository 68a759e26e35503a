"""The gateway's pure parts: the coalescing buffer, logprob lists, the directory, keys, seeds."""

from __future__ import annotations

import asyncio
import math

import pytest
from gateway_fakes import CARD, engine
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from pagemesh.gateway.directory import ModelDirectory
from pagemesh.gateway.generation import Generation, logprob_bytes
from pagemesh.gateway.metrics import GatewayMetrics
from pagemesh.gateway.openai.answer import MAX_WHOLE_BYTES
from pagemesh.gateway.openai.body import MAX_DEPTH, check_plain
from pagemesh.gateway.openai.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from pagemesh.gateway.openai.params import Seeds
from pagemesh.gateway.pending import PendingGeneration
from pagemesh.gateway.request_metrics import NO_ENGINE, ModelTally
from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import Delta, Generate, Prompt, TokenLogprob
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.wire import MAX_FRAME_BYTES, BadFrame, decode, encode, pack_ids, unpack_ids


def row(token: str, data: bytes, logprob: float, *top: tuple[str, float]) -> TokenLogprob:
    alternatives = [(i, text, text.encode(), value, i) for i, (text, value) in enumerate(top)]
    return TokenLogprob(5, token, data, logprob, 1, alternatives)


# -- Generation -----------------------------------------------------------------------------------

deltas = st.lists(
    st.tuples(
        st.integers(0, 1), st.integers(0, 2), st.text(max_size=4), st.lists(st.integers(0, 99))
    ),
    max_size=30,
)


@given(arrivals=deltas, takes=st.sets(st.integers(0, 29)))
def test_whenever_it_is_read_every_choice_gets_its_deltas_in_order(
    arrivals: list[tuple[int, int, str, list[int]]], takes: set[int]
) -> None:
    generation = Generation(2, 3)
    got = dict.fromkeys(range(6), ("", b""))
    expected = dict(got)

    def take() -> None:
        gains = generation.take()
        assert len({gain.choice for gain in gains}) == len(gains)
        for gain in gains:
            text, ids = got[gain.choice]
            got[gain.choice] = (text + gain.text, ids + gain.token_ids)

    for i, (prompt, choice, text, ids) in enumerate(arrivals):
        before = expected[prompt * 3 + choice]
        expected[prompt * 3 + choice] = (before[0] + text, before[1] + pack_ids(ids))
        generation.add(prompt, Delta("r", choice, text, pack_ids(ids)))
        if i in takes:
            take()
    take()
    assert got == expected
    assert generation.completion_tokens == sum(len(ids) for _, _, _, ids in arrivals)


def test_a_million_one_token_deltas_fit_into_a_whole_answer() -> None:
    generation = Generation(1024, 1, max_pending_bytes=MAX_WHOLE_BYTES)
    delta = Delta("r", 0, "ab", pack_ids([7]))
    for prompt in range(1024):
        for _ in range(1100):
            generation.add(prompt, delta)
    assert generation.held_bytes < 1024 * (64 * 256 + 1100 * 6)
    gains = generation.take()
    assert [gain.choice for gain in gains] == list(range(1024))
    assert {(gain.text, gain.token_ids) for gain in gains} == {("ab" * 1100, pack_ids([7] * 1100))}
    assert generation.held_bytes == 0


@given(sizes=st.lists(st.integers(0, 2000), max_size=40))
def test_a_stream_never_holds_much_more_than_its_bound(sizes: list[int]) -> None:
    given_up: list[bool] = []
    bound_bytes = 8192
    generation = Generation(
        1, 1, max_pending_bytes=bound_bytes, on_overflow=lambda _: given_up.append(True)
    )
    for size in sizes:
        generation.add(0, Delta("r", 0, "x" * size, b""))
    held = sum(len(gain.text) for gain in generation.take())
    assert held <= bound_bytes
    assert len(given_up) <= 1
    assert given_up or held == sum(sizes)


@given(rows=st.integers(0, 40), copies=st.integers(0, 4))
def test_prompt_logprobs_count_as_often_as_they_are_repeated(rows: int, copies: int) -> None:
    scored = [None, *[row("x", b"x", -1.0, ("y", -2.0))] * rows]
    generation = Generation(1, 1, prompt_logprob_copies=copies, max_pending_bytes=2**30)
    generation.add(0, Delta("r", 0, "", b""))
    before_bytes = generation.held_bytes
    generation.add(0, Delta("r", 0, "", b"", prompt_logprobs=scored))
    assert generation.held_bytes == 2 * before_bytes + copies * logprob_bytes(scored)


def test_released_prompt_logprobs_are_held_no_more_and_do_not_come_back() -> None:
    scored = [None, row("x", b"x", -1.0)]
    generation = Generation(1, 1, prompt_logprob_copies=1)
    for _ in range(2):
        generation.add(0, Delta("r", 0, "", b"", prompt_logprobs=scored))
        generation.take()
        generation.release_prompt_logprobs(0)
        assert (generation.prompts[0].logprobs, generation.held_bytes) == (None, 0)


async def test_an_echo_of_any_choice_waits_for_the_prompts_logprobs() -> None:
    generation = Generation(2, 2, needs_prompt_logprobs=True)
    generation.add(0, Delta("r", 1, "b", b""))
    assert generation.take() == []
    scored = [None, row("x", b"x", -1.0)]
    generation.add(0, Delta("r", 0, "a", b"", prompt_logprobs=scored))
    assert [gain.choice for gain in generation.take()] == [1, 0]
    assert generation.prompts[0].logprobs == scored


async def test_the_first_error_ends_the_answer() -> None:
    generation = Generation(1, 1)
    waiting = asyncio.create_task(generation.completed())
    await asyncio.sleep(0)
    generation.fail(RequestError("first"))
    generation.fail(RequestError("second"))
    with pytest.raises(RequestError, match="first"):
        await waiting


# -- PendingGeneration ----------------------------------------------------------------------------


@given(arrivals=st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 99)), st.booleans())))
def test_the_next_attempt_carries_what_every_choice_had(
    arrivals: list[tuple[int, list[int], bool]],
) -> None:
    tally = ModelTally()
    params = SamplingParams(n=3, seed=1)
    pending = PendingGeneration(
        Generate("r", 0, "tiny", Prompt(text="a"), params),
        0,
        Generation(1, 3),
        tally,
        now_s=0.0,
    )
    expected: list[list[int]] = [[], [], []]
    done: set[int] = set()
    for choice, ids, last in arrivals:
        if choice not in done:
            expected[choice] += ids
        reason = "length" if last else None
        pending.add(Delta("r", choice, "", pack_ids(ids), finish_reason=reason), now_s=1.0)
        done |= {choice} if last else set()
    pending.link_lost()
    again = pending.frame()
    assert again.attempt == 1
    assert again.params == params
    prior = list(map(unpack_ids, again.prior_ids)) or [[], [], []]
    assert prior == expected
    assert decode(encode(again)) == again
    pending.abandon()
    finished = tally.engine(NO_ENGINE).finished
    assert (finished["length"], finished["abort"]) == (len(done), 3 - len(done))


def nested(depth: int) -> list[object]:
    value: list[object] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, "x" * (MAX_FRAME_BYTES + 1)])
def test_what_no_frame_can_hold_is_refused_by_its_sender(value: object) -> None:
    prompt = Prompt(messages=[{"role": "user", "content": value}])
    with pytest.raises(BadFrame):
        encode(Generate("r", 0, "tiny", prompt, SamplingParams(seed=1)))


def test_the_deepest_nesting_the_gateway_takes_survives_the_wire() -> None:
    value = nested(MAX_DEPTH)
    check_plain(value, "messages[0]")
    with pytest.raises(RequestError, match="deeper"):
        check_plain([value], "messages[0]")
    prompt = Prompt(messages=[{"role": "user", "extra": {"a": value}}])
    generate = Generate("r", 0, "tiny", prompt, SamplingParams(seed=1))
    assert decode(encode(generate)) == generate


# -- logprobs -------------------------------------------------------------------------------------


def test_offsets_follow_bytes_through_a_split_character() -> None:
    halves = [row("�", part, -1.0) for part in (b"\xf0\x9f", b"\x98", b"\x80")]
    rows = [row("a", b"a", -1.0), *halves, row("é", "é".encode(), -1.0), row("z", b"z", -1.0)]
    piece = CompletionLogprobs().piece(rows)
    assert piece["text_offset"] == [0, 1, 1, 1, 2, 3]


def test_of_two_ids_with_equal_text_the_better_stays() -> None:
    piece = CompletionLogprobs().piece(
        [row("a", b"a", -3.0, ("a", -1.0), ("b", -2.0), ("b", -5.0))]
    )
    assert piece["top_logprobs"] == [{"a": -1.0, "b": -2.0}]
    assert piece["token_logprobs"] == [-3.0]


def test_json_never_sees_infinities() -> None:
    bad = row("a", b"a", -math.inf, ("a", -math.inf), ("b", math.nan))
    content = chat_logprobs([bad])["content"][0]
    assert content["logprob"] == -9999.0
    assert [top["logprob"] for top in content["top_logprobs"]] == [-9999.0, -9999.0]
    assert CompletionLogprobs().piece([bad])["top_logprobs"] == [{"a": -9999.0, "b": -9999.0}]
    rows = prompt_logprobs([None, bad])
    assert rows is not None
    assert rows[1] is not None
    assert all(math.isfinite(entry["logprob"]) for entry in rows[1].values())


def test_a_bos_outside_of_the_text_takes_no_room() -> None:
    rows = [row("H", b"H", -1.0), row("i", b"i", -1.0)]
    piece = CompletionLogprobs().piece(rows, first_prompt_token="<s>", prompt_text="Hi")
    assert piece["tokens"] == ["<s>", "H", "i"]
    assert piece["text_offset"] == [0, 0, 1]
    assert piece["token_logprobs"][0] is None


# -- directory, keys, seeds, labels ---------------------------------------------------------------


def test_the_directory_follows_its_links() -> None:
    directory = ModelDirectory()
    with pytest.raises(RequestError) as early:
        directory.resolve("tiny")
    assert early.value.status == 503
    directory.update("a", [engine("1")])
    directory.update("b", [engine("1"), engine("2", CARD._replace(names=["other"]))])
    assert directory.links_serving("tiny") == ["a", "b"]
    assert directory.links_serving("other") == ["b"]
    assert [e.engine_id for e in directory.engines()] == ["1", "2"]
    with pytest.raises(RequestError) as unknown:
        directory.resolve("nobody")
    assert unknown.value.status == 404
    directory.update("b", [engine("1")], draining=True)
    assert directory.links_serving("tiny") == ["a"]
    with pytest.raises(RequestError) as away:
        directory.resolve("other")
    assert away.value.status == 503
    directory.drop("a")
    assert directory.models == []


def test_a_given_seed_stays_and_drawn_ones_repeat() -> None:
    params = SamplingParams(seed=-5)
    assert Seeds(1).seeded(params) == params
    drawn = [Seeds(1).seeded(SamplingParams()).seed for _ in range(2)]
    assert drawn[0] == drawn[1]
    seeds = Seeds(None)
    assert seeds.seeded(SamplingParams()).seed != seeds.seeded(SamplingParams()).seed


def test_unknown_field_labels_are_bounded() -> None:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    for i in range(500):
        metrics.unknown_field("chat", f"field_{i}")
    assert generate_latest(registry).count(b"pagemesh_unknown_fields_total{") == 65

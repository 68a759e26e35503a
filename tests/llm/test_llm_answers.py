"""Tokens that are kept until their choice ends."""

from __future__ import annotations

from pagemesh.llm_answers import WholeAnswers
from pagemesh.shared.engine_messages import Ended, LogprobRow, Started, Tokens
from pagemesh.shared.messages import WireError
from pagemesh.shared.wire import pack_ids, unpack_ids


def frame(gained: dict[int, list[int]], **more: object) -> Tokens:
    ids = [token_id for each in gained.values() for token_id in each]
    counts = [len(each) for each in gained.values()]
    return Tokens("e", pack_ids(gained), pack_ids(counts), pack_ids(ids), **more)


def gained(tokens: Tokens | None) -> dict[int, list[int]]:
    assert tokens is not None
    ids = iter(unpack_ids(tokens.ids))
    counts = zip(unpack_ids(tokens.keys), unpack_ids(tokens.counts), strict=True)
    return {key: [next(ids) for _ in range(count)] for key, count in counts}


class EndsIn(dict[int, bool]):
    """Stands for StopEnds: a stop string may end in these tokens."""

    def __missing__(self, token_id: int) -> bool:
        return False


def opened(keys: list[int], watched: int | None = None, ends: int = 0) -> WholeAnswers:
    answers = WholeAnswers()
    for key in keys:
        answers.open(key, EndsIn({ends: True}) if key == watched else None)
    return answers


def test_a_choice_comes_with_all_its_tokens_when_it_ends() -> None:
    answers = opened([1, 2])
    assert answers.take(frame({1: [10], 2: [20]})) is None
    assert answers.take(frame({2: [21, 22], 1: [11]})) is None
    end = Ended(2, "length")
    out = answers.take(frame({1: [12], 2: [23]}, ended=[end]))
    assert gained(out) == {2: [20, 21, 22, 23]}
    assert out is not None
    assert out.ended == [end]
    assert gained(answers.take(frame({1: []}, ended=[Ended(1, "stop")]))) == {1: [10, 11, 12]}


def test_what_was_kept_passes_on_where_a_stop_string_may_end() -> None:
    answers = opened([1, 2], watched=2, ends=29)
    assert answers.take(frame({1: [10], 2: [20]})) is None
    assert gained(answers.take(frame({1: [10], 2: [29]}))) == {2: [20, 29]}
    assert gained(answers.take(frame({1: [10], 2: [29]}))) == {2: [29]}
    answers.close([2])
    assert answers.take(frame({1: [10], 2: [29]})) is None
    assert gained(answers.take(frame({}, ended=[Ended(1, "length")]))) == {1: [10, 10, 10, 10]}


def test_a_choice_that_may_end_and_does_passes_on_once() -> None:
    answers = opened([2], watched=2, ends=29)
    out = answers.take(frame({2: [29]}, ended=[Ended(2, "length")]))
    assert gained(out) == {2: [29]}


def test_logprobs_come_with_their_tokens() -> None:
    answers = opened([1, 2])
    rows = [LogprobRow(key, b"", b"", rank) for rank in (1, 2) for key in (2, 1)]
    assert answers.take(frame({1: [10], 2: [20]}, logprobs=rows[:2])) is None
    out = answers.take(frame({1: [11], 2: [21]}, logprobs=rows[2:], ended=[Ended(1, "length")]))
    assert out is not None
    assert out.logprobs == [rows[1], rows[3]]


def test_a_choice_that_fails_brings_what_it_had() -> None:
    answers = opened([1])
    answers.take(frame({1: [10]}))
    failed = [(1, WireError(500, None, None, "gone"))]
    out = answers.take(frame({}, failed=failed))
    assert gained(out) == {1: [10]}
    assert out is not None
    assert out.failed == failed


def test_what_is_said_of_strangers_is_passed_over() -> None:
    answers = opened([1])
    out = answers.take(frame({1: [10], 9: [90]}, ended=[Ended(9, "length")]))
    assert gained(out) == {}
    assert gained(answers.take(frame({}, ended=[Ended(1, "length")]))) == {1: [10]}


def test_a_start_is_told_at_once() -> None:
    answers = opened([1])
    out = answers.take(frame({1: [10]}, started=[Started(1, 7)]))
    assert out is not None
    assert out.started == [Started(1, 7)]
    assert gained(out) == {}

"""Answers that follow rules of token ids: allowed ids, bad words, a budget of reasoning."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_worker_grammars import TEXT, answer, new_driver
from worker_harness import EOS, PROMPT, VOCAB, Driver, alone, floats, tiny_decoder, tiny_runner

from pagemesh.shared.sampling import SamplingParams, ThinkingBudget
from pagemesh.shared.structured_outputs import StructuredOutputsParams
from pagemesh.shared.wire import unpack_ids
from pagemesh.worker_svc.grammar_masks import mask_of
from pagemesh.worker_svc.token_rules import TokenRules

HOT = SamplingParams(temperature=1.4)


def generated(params: SamplingParams, n: int = 24, seed: int = 0) -> list[int]:
    return alone(tiny_decoder(), PROMPT, params, n, seed=seed)


def allowed_next(params: SamplingParams, tokens: list[int], vocab_tokens: int = VOCAB) -> set[int]:
    rules = TokenRules(params, vocab_tokens)
    for token in tokens:
        rules.advance(token)
    mask = mask_of(range(vocab_tokens), vocab_tokens)
    rules.restrict(mask)
    return {token for token in range(vocab_tokens) if mask[token // 32] >> token % 32 & 1}


def test_only_allowed_tokens_come() -> None:
    params = SamplingParams(temperature=1.4, allowed_token_ids=[3, 64, 96, VOCAB + 7])
    assert set(generated(params)) == {3, 64, 96}


def test_a_lone_allowed_token_comes_even_if_it_may_not_end_the_answer_yet() -> None:
    params = SamplingParams(temperature=1.4, allowed_token_ids=[EOS], min_tokens=9)
    assert generated(params, 3) == [EOS, EOS, EOS]


def test_a_word_of_one_token_never_comes() -> None:
    [first] = generated(SamplingParams(temperature=0.0), 1)
    params = SamplingParams(temperature=0.0, bad_word_ids=[[first]])
    assert first not in generated(params)


def test_a_word_of_several_tokens_never_comes_and_its_parts_may() -> None:
    free = generated(HOT, 16)
    words = [free[4:7], free[9:11]]
    held = generated(SamplingParams(temperature=1.4, bad_word_ids=words), 16)
    assert held[:6] == free[:6]
    assert held[6] != free[6]
    for word in words:
        n = len(word)
        assert word not in [held[at : at + n] for at in range(len(held))]


def test_words_of_the_prompt_do_not_count() -> None:
    word = [PROMPT[-1], generated(HOT, 1)[0]]
    assert generated(SamplingParams(temperature=1.4, bad_word_ids=[word]), 8) == generated(HOT, 8)


def test_words_that_would_leave_nothing_are_let_through() -> None:
    params = SamplingParams(temperature=1.4, allowed_token_ids=[7], bad_word_ids=[[7]])
    assert generated(params, 3) == [7, 7, 7]
    rule = StructuredOutputsParams(choice=["7"])
    both = SamplingParams(structured_outputs=rule, bad_word_ids=[[TEXT.index("7")]])
    driver = new_driver()
    driver.enter(0, PROMPT, both)
    assert answer(driver) == [TEXT.index("7")]


@pytest.mark.parametrize("closing", [[40], [40, 41, 40, 42]])
@pytest.mark.parametrize("opened", [False, True], ids=["by the answer", "by the prompt"])
def test_a_budget_of_reasoning_is_exact(closing: list[int], opened: bool) -> None:
    opening = [] if opened else [30, 31]
    rest = range(50, 90)
    thinking = ThinkingBudget(5, opening, closing)
    bias = dict.fromkeys(rest, 60.0)
    tokens = generated(SamplingParams(temperature=1.0, thinking=thinking, logit_bias=bias))
    if opened:
        assert tokens[5 : 5 + len(closing)] == closing
        assert set(tokens[:5]) <= set(rest)
        assert set(tokens[5 + len(closing) :]) <= set(rest)
    else:
        assert not set(tokens) & {30, *closing}


@pytest.mark.parametrize(
    ("tokens", "forced"),
    [
        ([], None),
        ([8, 9, 8], None),
        ([30], None),
        ([30, 31, 1], None),
        ([30, 31, 1, 2], 40),
        ([30, 31, 1, 2, 40], 41),
        ([30, 31, 1, 40], 41),
        ([30, 31, 1, 40, 41], None),
        ([30, 31, 1, 2, 40, 41, 30, 31, 1, 2, 3], None),
        ([8, 30, 31, 1, 2], 40),
    ],
)
def test_when_the_end_of_the_reasoning_is_forced(tokens: list[int], forced: int | None) -> None:
    params = SamplingParams(thinking=ThinkingBudget(2, [30, 31], [40, 41]))
    expected = set(range(VOCAB)) if forced is None else {forced}
    assert allowed_next(params, tokens) == expected


def test_no_budget_at_all_closes_at_once() -> None:
    assert allowed_next(SamplingParams(thinking=ThinkingBudget(0, [], [40])), []) == {40}


words = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=6)


@given(words, st.lists(st.integers(0, 3), max_size=8), st.none() | st.sets(st.integers(0, 3)))
def test_what_may_come_next_is_what_completes_no_word(
    bad: list[list[int]], tokens: list[int], allowed: set[int] | None
) -> None:
    ids = sorted(allowed) if allowed else None
    found = allowed_next(SamplingParams(bad_word_ids=bad, allowed_token_ids=ids), tokens, 4)
    may = set(ids or range(4))
    completing = {word[-1] for word in bad if tokens[len(tokens) - len(word) + 1 :] == word[:-1]}
    assert found == ((may - completing) or may)


RULED = [
    SamplingParams(temperature=1.4, allowed_token_ids=[*range(0, VOCAB, 3)]),
    SamplingParams(
        temperature=1.4,
        bad_word_ids=[[3], [7, 8], [64, 7, 9]],
        allowed_token_ids=[3, 7, 8, 64, 9, 11],
    ),
    SamplingParams(
        temperature=1.4, thinking=ThinkingBudget(3, [], [40, 41]), repetition_penalty=1.2
    ),
]


@pytest.mark.parametrize("params", RULED)
def test_a_resumed_answer_goes_on_as_it_would_have(params: SamplingParams) -> None:
    whole = generated(params, 8)
    for n in range(1, 7):
        ids = PROMPT + whole[:n]
        assert alone(tiny_decoder(), ids, params, 8 - n, n_prompt=len(PROMPT)) == whole[n:]


def logprobs_of(params: SamplingParams, beside: SamplingParams) -> Iterator[dict[int, float]]:
    """Of a row with `params`, one with `beside` next to it: first without and then with them."""
    driver = Driver(tiny_runner(tiny_decoder()))
    driver.enter(0, PROMPT, beside)
    driver.enter(1, PROMPT, params)
    rows = driver.run({0: len(PROMPT), 1: len(PROMPT)}).logprobs
    for row in rows:
        yield dict(zip(unpack_ids(row.ids), floats(row.values).tolist(), strict=True))


def test_the_logprobs_of_chosen_tokens() -> None:
    every = SamplingParams(temperature=0.0, logprobs=64)
    some = SamplingParams(temperature=0.0, logprobs=1, logprob_token_ids=[90, 4, 17])
    for beside in (every, SamplingParams(temperature=0.0, logprobs=0, logprob_token_ids=[1])):
        *_, found = logprobs_of(some, beside)
        [all_of_them, _] = logprobs_of(every, every)
        best = max(all_of_them, key=all_of_them.__getitem__)
        assert list(found) == [best, 90, 4, 17]
        for token in set(found) & set(all_of_them):
            assert found[token] == pytest.approx(all_of_them[token], abs=1e-5)
        assert len(set(found) & set(all_of_them)) > 1

"""Answers that follow rules, on the CPU's executor. The rules are over single characters."""

from __future__ import annotations

import re

import pytest
import torch
from tiny_grammars import characters, tiny_grammars
from worker_harness import CONFIG, EOS, PROMPT, VOCAB, Driver, tiny_decoder

from pagemesh.shared.messages import Capacity, ModelCard
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.structured_outputs import StructuredOutputsParams
from pagemesh.shared.wire import unpack_ids
from pagemesh.worker_svc.books import new_batch
from pagemesh.worker_svc.cpu_executor import CPU, CPUExecutor
from pagemesh.worker_svc.kv_cache import KVCache
from pagemesh.worker_svc.runner import Runner

TEXT = characters(VOCAB, EOS)
NUMBER = SamplingParams(
    temperature=1.5, structured_outputs=StructuredOutputsParams(regex="-?[0-9]{2,6}")
)


def new_driver(*, with_rules: bool = True) -> Driver:
    kv = KVCache(CONFIG, 40, 4, torch.float32, CPU)
    card = ModelCard(["tiny"], VOCAB, 64, 4, "float32", [EOS], 1, "f", 0)
    capacity = Capacity(40, 4, 64, 512, "cpu")
    batch = new_batch(card, capacity)
    executor = CPUExecutor(
        tiny_decoder(),
        kv,
        batch,
        vocab_tokens=VOCAB,
        eos_token_ids=[EOS],
        grammars=tiny_grammars(VOCAB, EOS) if with_rules else None,
    )
    return Driver(Runner(executor, batch, card, capacity), block_tokens=4)


def answer(driver: Driver, slot: int = 0, *, most: int = 12) -> list[int]:
    """The tokens up to the end, without it."""
    tokens: list[int] = []
    while len(tokens) < most:
        result = driver.run({slot: driver.left(slot)})
        assert result.failed == []
        [token] = unpack_ids(result.sampled)
        if token == EOS:
            break
        tokens.append(token)
    return tokens


def text(tokens: list[int]) -> str:
    return "".join(TEXT[token] for token in tokens)


@pytest.mark.parametrize("seed", range(8))
def test_an_answer_follows_its_rule(seed: int) -> None:
    driver = new_driver()
    driver.enter(0, PROMPT, NUMBER, seed=seed)
    assert re.fullmatch("-?[0-9]{2,6}", text(answer(driver)))


def test_a_resumed_answer_goes_on_as_it_would_have() -> None:
    driver = new_driver()
    driver.enter(0, PROMPT, NUMBER, seed=3)
    whole = answer(driver)
    assert len(whole) > 2
    again = new_driver()
    again.enter(0, PROMPT + whole[:2], NUMBER, n_prompt=len(PROMPT), seed=3)
    assert whole[:2] + answer(again) == whole


def test_rows_beside_it_are_what_they_are_alone() -> None:
    plain = SamplingParams(temperature=1.3)
    alone, beside = new_driver(), new_driver()
    alone.enter(0, PROMPT, plain, seed=1)
    beside.enter(0, PROMPT, plain, seed=1)
    beside.enter(1, PROMPT, NUMBER, seed=2)
    for step in range(4):
        n_tokens = len(PROMPT) if step == 0 else 1
        one = alone.run({0: n_tokens})
        two = beside.run({0: n_tokens, 1: n_tokens})
        assert unpack_ids(two.sampled)[0] == unpack_ids(one.sampled)[0]


def test_what_follows_the_end_is_one_more_end() -> None:
    """A scheduler that runs ahead learns of the end a step late."""
    rule = StructuredOutputsParams(choice=["7"])
    driver = new_driver()
    driver.enter(0, PROMPT, SamplingParams(temperature=1.0, structured_outputs=rule))
    got = [unpack_ids(driver.run({0: driver.left(0)}).sampled)[0] for _ in range(4)]
    assert got == [TEXT.index("7"), EOS, EOS, EOS]


def test_a_rule_that_is_done_ends_an_answer_that_is_too_short() -> None:
    rule = StructuredOutputsParams(choice=["7"])
    driver = new_driver()
    driver.enter(0, PROMPT, SamplingParams(min_tokens=9, structured_outputs=rule))
    assert text(answer(driver)) == "7"


def test_a_rule_may_begin_later() -> None:
    mark = TEXT.index("!")
    rule = StructuredOutputsParams(regex="[xyz]{3}", begins_after=mark)
    params = SamplingParams(temperature=0.0, logit_bias={mark: 90.0}, structured_outputs=rule)
    driver = new_driver()
    driver.enter(0, PROMPT, params)
    got = text(answer(driver))
    assert re.fullmatch("![xyz]{3}", got)


@pytest.mark.parametrize(("bias", "form"), [(90.0, "<[^>]*>[xyz]{3}"), (-90.0, "[xyz]{3}")])
def test_a_rule_may_let_one_token_come_before_it(bias: float, form: str) -> None:
    """Which opens what is free up to another token; anything else must follow the rule."""
    opening, closing = TEXT.index("<"), TEXT.index(">")
    rule = StructuredOutputsParams(regex="[xyz]{3}", begins_after=closing, opened_by=opening)
    params = SamplingParams(
        temperature=1.0, logit_bias={opening: bias, closing: 4.0}, structured_outputs=rule
    )
    for seed in range(4):
        driver = new_driver()
        driver.enter(0, PROMPT, params, seed=seed)
        got = answer(driver, most=40)
        if len(got) < 40:
            assert re.fullmatch(form, text(got)), text(got)
        whole = new_driver()
        whole.enter(0, PROMPT + got[:2], params, n_prompt=len(PROMPT), seed=seed)
        assert got[:2] + answer(whole, most=len(got) - 2) == got


@pytest.mark.parametrize(
    ("rule", "generated"),
    [
        (StructuredOutputsParams(regex="(a"), []),
        (StructuredOutputsParams(json='{"type": "nonsense"}'), []),
        (StructuredOutputsParams(regex="[0-9]+"), [TEXT.index("x")]),
    ],
    ids=["regex", "schema", "generated"],
)
def test_a_rule_that_cannot_be_followed_fails_its_request_alone(
    rule: StructuredOutputsParams, generated: list[int]
) -> None:
    driver = new_driver()
    driver.enter(0, PROMPT, NUMBER)
    bad = SamplingParams(structured_outputs=rule)
    driver.enter(1, PROMPT + generated, bad, n_prompt=len(PROMPT))
    result = driver.run({0: driver.left(0), 1: driver.left(1)})
    [(row, reason)] = result.failed
    assert row == 1
    assert "structured_outputs" in reason
    assert unpack_ids(result.sampled)[0] >= 0


def test_without_a_vocabulary_a_request_with_a_rule_fails() -> None:
    driver = new_driver(with_rules=False)
    driver.enter(0, PROMPT, NUMBER)
    result = driver.run({0: driver.left(0)})
    assert "no vocabulary" in result.failed[0][1]

"""The runner on a tiny decoder: what a request gets never depends on how it is scheduled."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_harness import (
    BLOCK_TOKENS,
    GREEDY,
    PARAMS,
    PROMPT,
    RANDOM,
    VOCAB,
    Driver,
    alone,
    steps,
    tiny_decoder,
    tiny_runner,
)

from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.wire import unpack_ids
from pagemesh.worker_svc.models.decoder import Decoder


def test_decoding_equals_computing_the_whole_sequence_again(decoder: Decoder) -> None:
    ids = list(PROMPT)
    for _ in range(12):
        ids += alone(decoder, ids, GREEDY, 1)
    assert ids[len(PROMPT) :] == alone(decoder, PROMPT, GREEDY, 12)


@pytest.mark.parametrize("chunks", [[1] * 7, [2, 5], [3, 3, 1], [4, 3], [6, 1]])
@pytest.mark.parametrize("params", PARAMS)
def test_chunked_prompts_give_the_same_tokens(
    decoder: Decoder, chunks: list[int], params: SamplingParams
) -> None:
    driver = Driver(tiny_runner(decoder, fill=math.nan))
    driver.enter(2, PROMPT, params, seed=4)
    results = [driver.run({2: n}) for n in chunks]
    assert [unpack_ids(result.sampled)[0] for result in results[:-1]] == [-1] * (len(chunks) - 1)
    first = unpack_ids(results[-1].sampled)[0]
    assert [first, *steps(driver, 2, 9)] == alone(decoder, PROMPT, params, 10, seed=4)


@pytest.mark.parametrize("params", PARAMS)
def test_a_resumed_request_goes_on_as_it_would_have(
    decoder: Decoder, params: SamplingParams
) -> None:
    """Prior tokens come back as known ids; penalties and min_tokens still count them as output."""
    whole = alone(decoder, PROMPT, params, 12, seed=-9)
    resumed = alone(decoder, PROMPT + whole[:5], params, 7, seed=-9, n_prompt=len(PROMPT))
    assert resumed == whole[5:]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_tokens_do_not_depend_on_the_batch(decoder: Decoder, data: st.DataObject) -> None:
    """Random arrivals, chunks, slots, skipped rows and preemptions, with results read a step late:
    every request gets what it gets alone."""
    draw = data.draw
    driver = Driver(tiny_runner(decoder, fill=math.nan))
    waiting = [
        Request(
            ids=draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14)),
            params=draw(st.sampled_from(PARAMS)),
            seed=draw(st.integers(-5, 5)),
        )
        for _ in range(draw(st.integers(1, 4)))
    ]
    requests, running = list(waiting), {}
    for _ in range(draw(st.integers(4, 14))):
        if waiting and draw(st.booleans()):
            slot = draw(st.sampled_from([slot for slot in range(8) if slot not in running]))
            running[slot] = waiting.pop()
            running[slot].enter(driver, slot)
        work = {
            slot: draw(st.integers(1, driver.left(slot)))
            for slot in running
            if draw(st.sampled_from([True, True, True, False]))
        }
        step = driver.plan(work)
        for slot, token in driver.sampled(step, driver.runner.execute(step)).items():
            running[slot].output.append(token)
        if running and draw(st.sampled_from([False, False, True])):
            slot = draw(st.sampled_from(sorted(running)))
            driver.leave(slot)
            waiting.append(running.pop(slot))
    for request in requests:
        n = len(request.output)
        assert request.output == alone(decoder, request.ids, request.params, n, seed=request.seed)


class Request:
    def __init__(self, ids: list[int], params: SamplingParams, seed: int) -> None:
        self.ids, self.params, self.seed = ids, params, seed
        self.output: list[int] = []

    def enter(self, driver: Driver, slot: int) -> None:
        known = self.ids + self.output
        driver.enter(slot, known, self.params, n_prompt=len(self.ids), seed=self.seed)


def test_running_ahead_needs_no_results(decoder: Decoder) -> None:
    """All steps are planned before the first one is executed."""
    driver = Driver(tiny_runner(decoder))
    driver.enter(0, PROMPT, PARAMS[3], seed=1)
    driver.enter(5, PROMPT[:3], PARAMS[4], seed=2)
    plan = [driver.plan({0: 7, 5: 3}), *(driver.plan({5: 1, 0: 1}) for _ in range(9))]
    results = [driver.sampled(step, driver.runner.execute(step)) for step in plan]
    assert [result[0] for result in results] == alone(decoder, PROMPT, PARAMS[3], 10, seed=1)
    assert [result[5] for result in results] == alone(decoder, PROMPT[:3], PARAMS[4], 10, seed=2)


def test_a_slot_left_and_taken_in_one_step(decoder: Decoder) -> None:
    """Nothing of the former request shows: parameters, penalties, bans, tokens, blocks."""
    driver = Driver(tiny_runner(decoder, max_num_seqs=1))
    driver.enter(0, PROMPT, PARAMS[5], seed=3)
    driver.run({0: 7})
    steps(driver, 0, 3)
    for params in (GREEDY, PARAMS[3], PARAMS[4]):
        driver.leave(0)
        driver.enter(0, PROMPT[2:], params, seed=8)
        first = unpack_ids(driver.run({0: 5}).sampled)
        assert first + steps(driver, 0, 6) == alone(decoder, PROMPT[2:], params, 7, seed=8)


def test_a_fork_shares_full_blocks_and_copies_the_last(decoder: Decoder) -> None:
    driver = Driver(tiny_runner(decoder))
    prompt = [*PROMPT, 50, 51, 52]
    driver.enter(0, prompt, RANDOM, seed=1)
    first = unpack_ids(driver.run({0: len(prompt)}).sampled)
    parent_blocks = driver.slots[0].blocks
    copy = driver.free.pop()
    driver.copies = [parent_blocks[2], copy]
    shared = [*parent_blocks[:2], copy]
    driver.enter(1, prompt, RANDOM, seed=2, shared=shared, computed=len(prompt) - 1)
    output: dict[int, list[int]] = {0: first, 1: []}
    for _ in range(8):
        step = driver.plan({0: 1, 1: 1})
        for slot, token in driver.sampled(step, driver.runner.execute(step)).items():
            output[slot].append(token)
    assert output[0] == alone(decoder, prompt, RANDOM, 9, seed=1)
    assert output[1] == alone(decoder, prompt, RANDOM, 8, seed=2)
    assert output[0][:8] != output[1]


def test_a_prefix_found_in_the_cache(decoder: Decoder) -> None:
    driver = Driver(tiny_runner(decoder))
    prompt = [*PROMPT, 50, 51, 52]
    driver.enter(0, prompt)
    driver.run({0: len(prompt)})
    kept = driver.leave(0, keep_blocks=True)
    driver.enter(3, prompt, shared=kept[:2], computed=2 * BLOCK_TOKENS)
    first = unpack_ids(driver.run({3: 2}).sampled)
    assert first + steps(driver, 3, 5) == alone(decoder, prompt, GREEDY, 6)


def test_two_models_differ() -> None:
    """The tests above compare tokens of a decoder that says different things to different input."""
    first, second = tiny_decoder(0), tiny_decoder(1)
    assert alone(first, PROMPT, GREEDY, 6) != alone(second, PROMPT, GREEDY, 6)
    assert alone(first, PROMPT, GREEDY, 6) != alone(first, PROMPT[1:], GREEDY, 6)
    assert len(set(alone(first, PROMPT, RANDOM, 20))) > 5

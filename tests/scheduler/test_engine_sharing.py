"""Shared blocks: the prefix cache, its hashes, and the forks of one prompt."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_helpers import (
    OWNER,
    Driver,
    Seen,
    expected_answer,
    make_capacity,
    make_submit,
)

from pagemesh.scheduler_svc.client import Client
from pagemesh.scheduler_svc.request import Request
from pagemesh.shared.engine_messages import NewRow, PromptLogprobs
from pagemesh.shared.hashing import chain_hashes, split_hashes
from pagemesh.shared.wire import pack_ids, unpack_ids

PROMPT = list(range(3, 14))


def new_rows(driver: Driver) -> list[NewRow]:
    return [new for step in driver.steps for new in step.new]


# -- prefix cache ---------------------------------------------------------------------------------


def test_the_same_prompt_again_computes_only_its_tail_and_answers_the_same() -> None:
    """Known failure 60: cold and warm answers are equal."""
    driver = Driver()
    cold = driver.submit(make_submit(1, PROMPT))
    driver.run()
    warm = driver.submit(make_submit(2, PROMPT))
    driver.run()
    assert (cold.started, warm.started) == ([0], [8])
    assert [new.computed for new in new_rows(driver)] == [0, 8]
    assert cold.ids == warm.ids == expected_answer(PROMPT, 8)
    stats = driver.engine.stats()
    assert (stats.prefix_query_tokens_total, stats.prefix_hit_tokens_total) == (22, 8)


def test_a_reset_forgets_what_nobody_uses() -> None:
    driver = Driver()
    driver.submit(make_submit(1, PROMPT))
    driver.run()
    n_cached = sum(1 for first in range(256) for _ in driver.engine.contents.beginning_with(first))
    assert driver.engine.forget_cached() == n_cached > 0
    again = driver.submit(make_submit(2, PROMPT))
    driver.run()
    assert again.started == [0]
    assert again.ids == expected_answer(PROMPT, 8)


def test_a_hit_leaves_at_least_one_token_to_compute() -> None:
    driver = Driver()
    for key in (1, 2):
        driver.submit(make_submit(key, PROMPT[:8]))
        driver.run()
    assert [new.computed for new in new_rows(driver)] == [0, 4]


def test_a_conversation_hits_the_blocks_of_its_generated_tokens() -> None:
    driver = Driver()
    first = driver.submit(make_submit(1, PROMPT, max_tokens=8))
    driver.run()
    second = driver.submit(make_submit(2, [*PROMPT, *first.ids, 5, 6]))
    driver.run()
    # 19 tokens were known, 18 computed, 4 blocks of them full.
    assert second.started == [16]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_the_cache_can_be_turned_off(prefix_caching: bool) -> None:
    driver = Driver(prefix_caching=prefix_caching)
    for key in (1, 2):
        driver.submit(make_submit(key, PROMPT))
        driver.run()
    assert [new.computed for new in new_rows(driver)] == [0, 8 if prefix_caching else 0]
    assert driver.engine.stats().prefix_query_tokens_total == (22 if prefix_caching else 0)
    assert any(step.sealed for step in driver.steps) == prefix_caching


def test_another_salt_is_another_cache() -> None:
    driver = Driver()
    for key, salt in enumerate(["", "pepper", "pepper"]):
        driver.submit(make_submit(key, PROMPT, cache_salt=salt))
        driver.run()
    assert [new.computed for new in new_rows(driver)] == [0, 0, 8]


def test_scored_prompts_are_computed_whole_every_time_and_published() -> None:
    """Known failure 28: the second answer has the same prompt logprobs as the first."""
    driver = Driver()
    scored = []
    for key in range(2):
        scored.append(driver.submit(make_submit(key, PROMPT, prompt_logprobs=0)))
        driver.run()
    plain = driver.submit(make_submit(9, PROMPT))
    driver.run()
    assert [seen.prompt_positions for seen in scored] == [list(range(1, 11))] * 2
    assert [new.computed for new in new_rows(driver)] == [0, 0, 8]
    assert plain.started == [8]


def test_prompt_logprobs_are_delivered_once_whatever_happens_on_the_way() -> None:
    driver = Driver(capacity=make_capacity(num_blocks=9, budget=5), watermark=0.0)
    seen = [
        driver.submit(make_submit(key, [3 + key] * 11, max_tokens=9, prompt_logprobs=0))
        for key in range(3)
    ]
    driver.run()
    assert driver.engine.counters.preemptions > 0
    assert [answer.prompt_positions for answer in seen] == [list(range(1, 11))] * 3


@pytest.mark.parametrize(
    ("start", "n_rows", "wanted_from", "passed", "next_wanted"),
    [
        (1, 4, 1, [1, 2, 3, 4], 5),
        (1, 4, 3, [3, 4], 5),
        (1, 4, 5, [], 5),
        (1, 4, 9, [], 9),
        (4, 2, 3, [], 3),
    ],
)
def test_prompt_logprobs_pass_from_the_position_wanted(
    start: int, n_rows: int, wanted_from: int, passed: list[int], next_wanted: int
) -> None:
    positions = range(start, start + n_rows)
    ids = pack_ids(token for position in positions for token in (position, 100))
    rows = PromptLogprobs(0, start, 2, ids, bytes(len(ids)), pack_ids(positions))
    client = Client()
    assert client.add_prompt_logprobs(7, rows, wanted_from) == next_wanted
    frame = client.take_frame("engine")
    assert (frame is not None) == bool(passed)
    if frame is not None:
        [got] = frame.prompt_logprobs
        assert (got.key, got.start, unpack_ids(got.ranks)) == (7, passed[0], passed)
        assert unpack_ids(got.ids) == [token for p in passed for token in (p, 100)]
        assert len(got.values) == len(got.ids)


def test_published_hashes_continue_the_chain_of_the_prompt() -> None:
    """The golden chain: what the tokenizer service computes for prompts goes on here."""
    driver = Driver()
    seen = driver.submit(make_submit(1, PROMPT, max_tokens=10, cache_salt="pepper"))
    driver.run()
    driver.submit(make_submit(2, [28], max_tokens=1))
    driver.run()
    sealed = [c for step in driver.steps for c in split_hashes(step.sealed_hashes)]
    ids = pack_ids([*PROMPT, *seen.ids])
    assert sealed == chain_hashes(ids, 4, salt="pepper")[: len(sealed)]
    assert len(sealed) == 5
    assert sealed[1].hex() == "ba2336bf90434271542bf9bd6a8fb0e3"


def test_the_senders_hashes_are_taken_over_and_wrong_ones_are_not() -> None:
    packed = b"".join(chain_hashes(pack_ids(PROMPT), 4))
    driver = Driver()
    for key, hashes in enumerate([packed, packed[:16], b""]):
        driver.submit(make_submit(key, PROMPT, hashes=hashes))
        driver.run()
    assert [new.computed for new in new_rows(driver)] == [0, 8, 8]


@settings(max_examples=60, deadline=None)
@given(
    edits=st.lists(st.tuples(st.integers(0, 15), st.integers(3, 5)), min_size=1, max_size=6),
    lengths=st.lists(st.integers(1, 16), min_size=6, max_size=6),
)
def test_a_history_with_one_token_changed_is_another_history(
    edits: list[tuple[int, int]], lengths: list[int]
) -> None:
    """Known failure 61. The worker model fails on any block that holds another context."""
    driver = Driver(capacity=make_capacity(num_blocks=12))
    history = [3] * 16
    for key, (place, token) in enumerate(edits):
        history[place] = token
        prompt = history[: lengths[key]]
        seen = driver.submit(make_submit(key, prompt, max_tokens=5))
        driver.run()
        assert seen.ids == expected_answer(prompt, 5)


# -- forks ----------------------------------------------------------------------------------------


def submit_group(driver: Driver, prompt: list[int], n: int = 3, **fields: object) -> list[Seen]:
    return [
        driver.submit(make_submit(i, prompt, group="group", choice=i, **fields)) for i in range(n)
    ]


@pytest.mark.parametrize(
    ("n_prompt", "shared_blocks", "copied"),
    [(11, 2, True), (8, 1, True), (9, 2, False), (1, 0, False)],
)
def test_choices_share_the_prompts_blocks_and_copy_what_they_write(
    n_prompt: int, shared_blocks: int, copied: bool
) -> None:
    driver = Driver(prefix_caching=False)
    seen = submit_group(driver, PROMPT[:n_prompt])
    first, second = driver.step(), driver.step()
    [leader] = first.new
    assert driver.rows(first) == [(leader.slot, n_prompt)]
    forks = second.new
    assert [fork.computed for fork in forks] == [n_prompt - 1] * 2
    leader_blocks = unpack_ids(leader.blocks)
    for fork in forks:
        assert unpack_ids(fork.blocks)[:shared_blocks] == leader_blocks[:shared_blocks]
    copies = unpack_ids(second.copies)
    assert copies[::2] == [leader_blocks[shared_blocks]] * (2 if copied else 0)
    driver.run()
    for answer in seen:
        assert answer.ids == expected_answer(PROMPT[:n_prompt], 8)
    assert [answer.started for answer in seen] == [[0], [0], [0]]


def test_those_behind_waiting_choices_do_not_wait_for_them() -> None:
    driver = Driver(capacity=make_capacity(budget=8), run_ahead_depth=1)
    submit_group(driver, PROMPT)
    driver.step()
    driver.submit(make_submit(9, [3, 4]))
    stats = driver.engine.stats()
    assert (stats.running, stats.waiting) == (1, 3)
    step = driver.step()
    assert [len(unpack_ids(new.ids)) for new in step.new] == [2]
    assert len(driver.step().new) == 2


def test_choices_whose_leader_is_gone_compute_the_prompt_themselves() -> None:
    driver = Driver(prefix_caching=False, capacity=make_capacity(budget=6))
    seen = submit_group(driver, PROMPT)
    driver.step()
    driver.engine.end(OWNER, [0], "abort", 0.0)
    driver.run()
    assert [new.computed for new in new_rows(driver)] == [0, 0, 0]
    assert [answer.ids for answer in seen[1:]] == [expected_answer(PROMPT, 8)] * 2


def test_choices_of_a_preempted_leader_compute_the_prompt_themselves() -> None:
    driver = Driver(
        prefix_caching=False,
        capacity=make_capacity(num_blocks=9, budget=3),
        watermark=0.0,
        run_ahead_depth=1,
    )
    driver.submit(make_submit(7, [3] * 4, max_tokens=20))
    for _ in range(2):
        driver.step()
    seen = submit_group(driver, PROMPT[:10] + [3] * 10, max_tokens=2)
    driver.step()
    leader = driver.engine._clients[OWNER].requests[0]
    while driver.engine.stats().preemptions_total == 0:
        assert len(leader.followers) == 2
        driver.step()
    assert leader.followers == []
    driver.run()
    for answer in seen:
        assert answer.ids == expected_answer(PROMPT[:10] + [3] * 10, 2)


def test_resumed_choices_fork_the_prompt_and_compute_their_own_tail() -> None:
    driver = Driver(prefix_caching=False)
    answer = expected_answer(PROMPT, 8)
    for i in range(2):
        driver.submit(make_submit(i, PROMPT, prior=answer[: 3 * i], group="g", choice=i))
    driver.run()
    assert [new.computed for new in new_rows(driver)] == [0, 11]
    assert driver.seen[OWNER, 0].ids == answer
    assert driver.seen[OWNER, 1].ids == answer[3:]


@pytest.mark.parametrize("other", [{"prompt": PROMPT[:-1]}, {"cache_salt": "pepper"}])
def test_a_choice_with_another_prompt_is_no_fork(other: dict[str, object]) -> None:
    driver = Driver(prefix_caching=False)
    prompt = other.pop("prompt", PROMPT)
    driver.submit(make_submit(0, PROMPT, group="g"))
    driver.submit(make_submit(1, prompt, group="g", choice=1, **other))  # type: ignore[arg-type]
    driver.run()
    assert [new.computed for new in new_rows(driver)] == [0, 0]


def test_a_choice_does_not_fork_a_leader_that_is_only_half_way_again() -> None:
    """After a preemption the choices queue on their own; the leader, back first, computes its
    prompt in chunks beside them."""
    driver = Driver(
        prefix_caching=False,
        capacity=make_capacity(num_blocks=17, budget=8),
        watermark=0.0,
        run_ahead_depth=2,
    )
    driver.submit(make_submit(9, [3], max_tokens=1))
    driver.step()
    seen = submit_group(driver, PROMPT, n=2)
    assert driver.engine.plan(0.0) is not None  # never arrives: leader and choice wait again
    driver.plan()
    driver.run()
    assert [new.computed for new in new_rows(driver)[1:]] == [0, 0]
    assert [answer.ids for answer in seen] == [expected_answer(PROMPT, 8)] * 2


def test_a_block_reused_in_the_step_that_would_seal_it_is_not_sealed() -> None:
    driver = Driver(capacity=make_capacity(num_blocks=4), run_ahead_depth=1)
    driver.submit(make_submit(1, PROMPT[:8], max_tokens=1))
    driver.submit(make_submit(2, [3] * 11, max_tokens=1))
    driver.step()
    step = driver.step()
    assert step.new
    assert step.sealed == b""
    driver.run()


def test_a_tail_of_one_token_that_fails_takes_the_forks_with_it() -> None:
    """The last of the prompt may look like a decode: one token in a step of its own."""
    driver = Driver(run_ahead_depth=3, capacity=make_capacity(budget=10))
    seen = submit_group(driver, PROMPT, n=2)
    driver.plan(failed=[0])
    driver.plan()
    driver.plan()
    assert len(driver.steps[2].new) == 1
    driver.run()
    assert [answer.error for answer in seen] == ["step_failed"] * 2


@pytest.mark.parametrize("leader_is_over", [False, True])
def test_choices_built_on_a_prompt_that_failed_fail_too(leader_is_over: bool) -> None:
    driver = Driver(run_ahead_depth=2)
    seen = submit_group(driver, PROMPT)
    beside = driver.submit(make_submit(9, [3, 4, 5]))
    driver.plan(failed=[0])
    driver.plan()
    if leader_is_over:
        driver.engine.end(OWNER, [0], "abort", 0.0)
    driver.run()
    assert [answer.error for answer in seen[1:]] == ["step_failed"] * 2
    assert [answer.ids for answer in seen] == [[], [], []]
    assert beside.ids == expected_answer([3, 4, 5], 8)


def n_remembered(request_id: str) -> int:
    """Requests that are somewhere in memory."""
    requests = [each for each in gc.get_objects() if type(each) is Request]
    return sum(request.request_id == request_id for request in requests)


@pytest.mark.parametrize("leader_ends_first", [False, True])
def test_choices_that_ended_are_freed_without_the_garbage_collector(
    leader_ends_first: bool,
) -> None:
    """It runs rarely in this service."""
    driver = Driver(run_ahead_depth=2)
    request_id = f"freed {leader_ends_first}"
    submit_group(driver, PROMPT, request_id=request_id)
    driver.plan()
    driver.plan()
    assert len(driver.engine._clients[OWNER].requests[0].forks) == 2
    gc.disable()
    try:
        if leader_ends_first:
            driver.engine.end(OWNER, [0], "abort", 0.0)
        driver.run()
        driver.submit(make_submit(9, [3, 4, 5]))  # steps to come forget the rows of those before
        driver.run()
        assert n_remembered(request_id) == 0
    finally:
        gc.enable()


def test_only_choice_zero_scores_the_prompt() -> None:
    driver = Driver()
    seen = submit_group(driver, PROMPT, prompt_logprobs=0)
    driver.run()
    positions = list(range(1, 11))
    assert [answer.prompt_positions for answer in seen] == [positions, [], []]
    assert [new.params.prompt_logprobs for new in new_rows(driver)] == [0, None, None]
    assert [new.computed for new in new_rows(driver)] == [0, 10, 10]

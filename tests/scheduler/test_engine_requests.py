"""What a request may ask for, and what it is told: limits, stops, resumes, failures, aborts."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_helpers import OWNER, Driver, expected_answer, make_capacity, make_card, make_submit
from worker_model import EOS, EPOCH

from pagemesh.scheduler_svc.errors import InvariantError
from pagemesh.shared.engine_messages import Started, StepResult
from pagemesh.shared.errors import RequestError
from pagemesh.shared.wire import pack_ids, unpack_ids

PROMPT = [3, 4, 5, 6, 7]
ANSWER = expected_answer(PROMPT, 30)
EOS_PROMPT = next(p for p in ([3, k] for k in range(1, 400)) if expected_answer(p, 6)[3] == EOS)


def ask(prompt: list[int] = PROMPT, **fields: Any) -> Any:
    driver = Driver()
    seen = driver.submit(make_submit(1, prompt, **fields))
    driver.run()
    return seen


# -- limits ---------------------------------------------------------------------------------------


def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers() -> None:
    driver = Driver(card=make_card(max_model_len=20))
    with pytest.raises(RequestError, match=r"maximum context length is 20 tokens.* 21 ") as caught:
        driver.submit(make_submit(1, [3] * 20, max_tokens=None))
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    with pytest.raises(RequestError, match=r"29 tokens \(19 in the prompt, 10 for the answer\)"):
        driver.submit(make_submit(1, [3] * 19, max_tokens=10))


def test_a_request_larger_than_the_pool_is_refused_and_later_ones_run() -> None:
    """Known failure 58: it would block the queue for ever."""
    driver = Driver(capacity=make_capacity(num_blocks=5))
    with pytest.raises(RequestError, match=r"needs KV cache for 17 tokens .* holds 16") as caught:
        driver.submit(make_submit(1, [3] * 16, max_tokens=1))
    assert (caught.value.status, caught.value.code) == (400, "kv_cache_exceeded")
    later = driver.submit(make_submit(2, [3] * 8, max_tokens=8))
    driver.run()
    assert later.ids == expected_answer([3] * 8, 8)


@pytest.mark.parametrize(("max_model_len", "num_blocks"), [(12, 65), (256, 4)])
def test_without_max_tokens_the_answer_takes_what_fits(max_model_len: int, num_blocks: int) -> None:
    driver = Driver(
        card=make_card(max_model_len=max_model_len), capacity=make_capacity(num_blocks=num_blocks)
    )
    seen = driver.submit(make_submit(1, PROMPT, max_tokens=None))
    driver.run()
    assert seen.ids == ANSWER[: 12 - len(PROMPT)]
    assert seen.ended == ("length", None)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"prompt_ids": b""}, "empty"),
        ({"prompt_ids": b"abc"}, "damaged"),
        ({"prior_ids": b"abcde"}, "damaged"),
        ({"key": -1}, "key -1"),
        ({"key": 2**31}, "key 2147483648"),
        ({"key": 7}, "key 7"),
    ],
)
def test_what_makes_no_sense_is_refused(damage: dict[str, Any], message: str) -> None:
    driver = Driver()
    beside = driver.submit(make_submit(7, PROMPT))
    with pytest.raises(RequestError, match=message):
        driver.submit(make_submit(1, PROMPT)._replace(**damage))
    driver.run()
    assert beside.ids == ANSWER[:8]


# -- stops ----------------------------------------------------------------------------------------


def test_the_end_of_sequence_is_delivered_and_is_no_stop_reason() -> None:
    seen = ask(EOS_PROMPT, max_tokens=20, ignore_eos=False)
    assert seen.ids == expected_answer(EOS_PROMPT, 4)
    assert seen.ids[-1] == EOS
    assert seen.ended == ("stop", None)


def test_ignore_eos_goes_on_unless_the_caller_named_it() -> None:
    assert ask(EOS_PROMPT, max_tokens=6).ids == expected_answer(EOS_PROMPT, 6)
    named = ask(EOS_PROMPT, max_tokens=6, stop_token_ids=[EOS])
    assert (len(named.ids), named.ended) == (4, ("stop", EOS))


def test_eos_that_is_also_a_stop_token_counts_as_the_models_own() -> None:
    seen = ask(EOS_PROMPT, max_tokens=6, ignore_eos=False, stop_token_ids=[EOS])
    assert seen.ended == ("stop", None)


def test_a_stop_token_ends_with_its_id() -> None:
    seen = ask(max_tokens=20, stop_token_ids=[ANSWER[2], 1])
    first = ANSWER.index(ANSWER[2])
    assert seen.ids == ANSWER[: first + 1]
    assert seen.ended == ("stop", ANSWER[2])


def test_a_stop_at_the_length_limit_is_a_stop() -> None:
    first = ANSWER.index(ANSWER[2])
    seen = ask(max_tokens=first + 1, stop_token_ids=[ANSWER[2]])
    assert seen.ended == ("stop", ANSWER[2])


def test_no_stop_counts_before_min_tokens() -> None:
    seen = ask(max_tokens=30, min_tokens=5, stop_token_ids=sorted(set(ANSWER)))
    assert seen.ids == ANSWER[:6]


@pytest.mark.parametrize("prompt_logprobs", [None, 0])
def test_max_tokens_zero_computes_the_prompt_and_generates_nothing(
    prompt_logprobs: int | None,
) -> None:
    seen = ask(max_tokens=0, prompt_logprobs=prompt_logprobs, logprobs=0)
    assert seen.ids == seen.logprob_ids == []
    assert seen.ended == ("length", None)
    assert seen.prompt_positions == ([] if prompt_logprobs is None else [1, 2, 3, 4])


def test_max_tokens_zero_may_fill_the_whole_context() -> None:
    driver = Driver(card=make_card(max_model_len=8))
    seen = driver.submit(make_submit(1, [3] * 8, max_tokens=0))
    driver.run()
    assert seen.ended == ("length", None)


# -- resumes --------------------------------------------------------------------------------------


def test_a_resumed_request_goes_on_where_it_was() -> None:
    seen = ask(max_tokens=9, prior=ANSWER[:4])
    assert seen.ids == ANSWER[4:9]
    assert seen.ended == ("length", None)


def test_prior_tokens_count_for_min_tokens_and_are_not_checked_again() -> None:
    seen = ask(max_tokens=30, min_tokens=5, prior=ANSWER[:4], stop_token_ids=sorted(set(ANSWER)))
    assert seen.ids == ANSWER[4:6]


def test_a_resumed_request_that_was_done_ends_without_a_token() -> None:
    seen = ask(max_tokens=4, prior=ANSWER[:4])
    assert (seen.ids, seen.ended) == ([], ("length", None))


def test_the_worker_is_told_which_tokens_are_the_true_prompt() -> None:
    driver = Driver()
    driver.submit(make_submit(1, PROMPT, prior=ANSWER[:4]))
    [new] = driver.step().new
    assert (new.n_prompt, unpack_ids(new.ids)) == (5, PROMPT + ANSWER[:4])


# -- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "code"), [("nonfinite", "nonfinite_logits"), ("failed", "step_failed")]
)
def test_a_row_that_goes_wrong_ends_alone_and_leaves_nothing_in_the_cache(
    fault: str, code: str
) -> None:
    driver = Driver(run_ahead_depth=2)
    bad = driver.submit(make_submit(1, [3] * 8))
    good = driver.submit(make_submit(2, [4] * 8))
    driver.plan()
    driver.plan(**{fault: [0]})
    driver.run()
    assert bad.error == code
    assert bad.ended is None
    assert good.ids == expected_answer([4] * 8, 8)
    assert driver.engine.counters.finished["error"] == 1
    again = driver.submit(make_submit(3, [3] * 8))
    driver.run()
    assert again.started == [0]
    assert again.ids == expected_answer([3] * 8, 8)


@pytest.mark.parametrize("fault", ["nonfinite", "failed"])
def test_a_request_that_fails_in_its_first_step_never_started(fault: str) -> None:
    driver = Driver()
    bad = driver.submit(make_submit(1, [3] * 8))
    good = driver.submit(make_submit(2, [4] * 8))
    driver.plan(**{fault: [0]})
    driver.run()
    assert bad.error is not None
    assert bad.started == []
    assert good.started == [0]


def test_a_row_that_should_have_sampled_and_did_not_fails_alone() -> None:
    driver = Driver()
    mute = driver.submit(make_submit(1, PROMPT))
    fine = driver.submit(make_submit(2, PROMPT))
    driver.plan()
    result = driver.pending.pop()
    assert isinstance(result, StepResult)
    tokens = unpack_ids(result.sampled)
    driver.pending.append(result._replace(sampled=pack_ids([-1, tokens[1]])))
    driver.run()
    assert (mute.error, mute.ids, mute.started) == ("step_failed", [], [])
    assert fine.ids == ANSWER[:8]


@pytest.mark.parametrize(
    "damage", [{"step": 2}, {"sampled": b""}, {"nonfinite": [4]}, {"failed": [(-1, "?")]}]
)
def test_a_result_that_makes_no_sense_fails_the_engines_requests_and_it_goes_on(
    damage: dict[str, Any],
) -> None:
    driver = Driver()
    seen = driver.submit(make_submit(1, PROMPT))
    driver.plan()
    result = driver.pending.pop()
    assert isinstance(result, StepResult)
    with pytest.raises(InvariantError):
        driver.engine.apply(result._replace(**damage), 0.0)
    driver.note(driver.engine.fail_all("the engine failed"))
    assert seen.error == "engine_failure"
    # The late result is nobody's, the worker's batch is emptied, and new requests run.
    assert driver.engine.apply(result, 0.0) == {}
    again = driver.submit(make_submit(2, PROMPT))
    assert driver.step().base == 0
    driver.run()
    assert again.ids == ANSWER[:8]


def test_what_was_said_before_a_failure_is_not_lost() -> None:
    """A request that ended in the very frame that was being filled is told so."""
    driver = Driver(run_ahead_depth=1)
    ended = driver.submit(make_submit(1, PROMPT, max_tokens=1))
    running = driver.submit(make_submit(2, PROMPT))
    driver.plan()
    result = driver.pending.pop()
    assert isinstance(result, StepResult)
    broken = driver.engine._clients[OWNER].requests[2]
    broken.max_length = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        driver.engine.apply(result, 0.0)
    driver.note(driver.engine.fail_all("the engine failed"))
    assert ended.ended == ("length", None)
    assert running.error == "engine_failure"


def test_results_of_another_incarnation_of_the_worker_are_ignored() -> None:
    driver = Driver()
    driver.submit(make_submit(1, PROMPT))
    driver.plan()
    result = driver.pending[0]
    assert isinstance(result, StepResult)
    assert driver.engine.apply(result._replace(epoch=EPOCH + 1), 0.0) == {}
    driver.run()


def test_a_gap_makes_the_next_step_carry_everyone_as_new() -> None:
    driver = Driver(run_ahead_depth=2)
    seen = [driver.submit(make_submit(key, [3 + key] * 6)) for key in range(2)]
    driver.step()
    assert driver.engine.plan(0.0) is not None  # never arrives
    driver.plan()
    driver.land()
    step = driver.plan()
    assert step is not None
    assert step.base == 0
    assert [len(unpack_ids(new.ids)) for new in step.new] == [7, 7]
    assert [new.computed for new in step.new] == [6, 6]
    driver.engine.snapshot(1)  # asked for twice, while the snapshot was on its way
    driver.run()
    assert [step.base for step in driver.steps].count(0) == 2
    for key, answer in enumerate(seen):
        assert answer.ids == expected_answer([3 + key] * 6, 8)
    assert driver.engine.stats().preemptions_total == 0


def test_a_request_that_entered_in_a_lost_step_enters_again() -> None:
    driver = Driver(run_ahead_depth=2)
    first = driver.submit(make_submit(1, [3] * 6))
    driver.step()
    second = driver.submit(make_submit(2, [4] * 6))
    assert driver.engine.plan(0.0) is not None  # never arrives
    driver.plan()
    driver.run()
    assert first.ids == expected_answer([3] * 6, 8)
    assert second.ids == expected_answer([4] * 6, 8)


# -- aborts (known failures 66 and 68) ------------------------------------------------------------


@pytest.mark.parametrize("planned_steps", [0, 1, 2])
@pytest.mark.parametrize("reason", ["abort", "stop"])
def test_an_ended_request_frees_slot_and_blocks_at_once_and_is_counted(
    planned_steps: int, reason: str
) -> None:
    driver = Driver(run_ahead_depth=2)
    driver.submit(make_submit(1, PROMPT))
    for _ in range(planned_steps):
        driver.plan()
    driver.engine.end(OWNER, [1], reason, 0.0)
    stats = driver.engine.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)
    assert driver.engine.counters.finished[reason] == 1
    driver.engine.end(OWNER, [1], reason, 0.0)
    driver.engine.end("nobody", [1], reason, 0.0)
    assert driver.engine.counters.finished[reason] == 1
    driver.run()
    assert driver.seen[OWNER, 1].ids == []


def test_an_owner_that_goes_takes_its_requests_with_it_and_no_others() -> None:
    driver = Driver()
    for key in range(3):
        driver.submit(make_submit(key, PROMPT), owner="gone")
    stays = driver.submit(make_submit(1, PROMPT), owner="stays")
    driver.plan()
    assert driver.engine.drop_owner("gone") == 3
    assert driver.engine.drop_owner("gone") == 0
    assert driver.engine.counters.finished["abort"] == 3
    driver.run()
    assert stays.ids == ANSWER[:8]
    assert driver.seen["gone", 0].ids == []


def test_every_unfinished_request_is_lost_with_the_worker() -> None:
    driver = Driver(max_num_seqs=1)
    driver.submit(make_submit(1, PROMPT, max_tokens=1), owner="a")
    driver.submit(make_submit(2, PROMPT), owner="a")
    driver.submit(make_submit(3, PROMPT), owner="b")
    driver.step()
    assert driver.engine.lost() == {"a": [2], "b": [3]}


# -- books ----------------------------------------------------------------------------------------


def test_the_audit_finds_and_repairs_a_leak() -> None:
    driver = Driver()
    driver.submit(make_submit(1, PROMPT))
    driver.run()
    blocks = driver.engine._residents.blocks
    blocks.take(2)
    driver.engine._residents._free_slots.pop()
    findings = driver.engine.audit()
    assert any("counts 1 holders but has 0" in finding for finding in findings)
    assert any("slots" in finding for finding in findings)
    assert driver.engine.counters.audit_findings == len(findings)
    assert driver.engine.audit() == []
    assert blocks.free == blocks.total


def test_time_comes_in_as_an_argument() -> None:
    driver = Driver(run_ahead_depth=2)
    engine = driver.engine
    driver.submit(make_submit(1, PROMPT, max_tokens=2))
    for now_s in (10.0, 11.0):
        step = engine.plan(now_s)
        assert step is not None
        driver.pending.append(driver.worker.execute(step))
    assert engine.step_age_s(12.0) == 2.0
    assert engine.idle_for_s(12.0) == 0.0
    for now_s in (13.0, 14.0):
        result = driver.pending.popleft()
        assert isinstance(result, StepResult)
        engine.apply(result, now_s)
        assert engine.step_age_s(15.0) == (2.0 if driver.pending else 0.0)
    assert engine.idle_for_s(16.0) == 2.0


def test_a_start_tells_the_wait_for_the_first_step_and_the_time_to_the_first_token() -> None:
    driver = Driver(run_ahead_depth=1)
    driver.engine.submit(OWNER, make_submit(1, PROMPT, max_tokens=2), 10.0)
    starts: list[Started] = []
    for planned_s in (12.0, 14.0):
        step = driver.engine.plan(planned_s)
        assert step is not None
        result = driver.worker.execute(step)
        assert isinstance(result, StepResult)
        frames = driver.engine.apply(result._replace(inside_s=0.25), planned_s + 1)
        starts += frames[OWNER].started
    assert starts == [Started(1, 0, queue_s=2.0, prefill_s=1.0)]
    steps = driver.engine.stats().steps
    assert (steps.round_trip_s.total, steps.worker_s.total, steps.link_s.total) == (2.0, 0.5, 1.5)
    assert steps.tokens.total == len(PROMPT) + 1

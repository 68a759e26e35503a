"""Who computes what, and when: budget, admission, preemption, run-ahead."""

from __future__ import annotations

import pytest
from scheduler_helpers import Driver, expected_answer, make_capacity, make_card, make_submit
from structlog.typing import EventDict
from worker_model import EPOCH

from pagemesh.scheduler_svc.engine import Engine
from pagemesh.shared.errors import RequestError, SettingsError
from pagemesh.shared.settings import SchedulerSettings
from pagemesh.shared.wire import unpack_ids


def prompt(n: int, token: int = 3) -> list[int]:
    return [token] * n


# -- budget ---------------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks_beside_decodes_and_behind_them() -> None:
    driver = Driver(capacity=make_capacity(budget=10), run_ahead_depth=1)
    short = driver.submit(make_submit(1, prompt(4), max_tokens=6))
    assert driver.rows(driver.step()) == [(0, 4)]
    long = driver.submit(make_submit(2, prompt(25, 4), max_tokens=2))
    assert [driver.rows(driver.step()) for _ in range(3)] == [
        [(0, 1), (1, 9)],
        [(0, 1), (1, 9)],
        [(0, 1), (1, 7)],
    ]
    driver.run()
    assert short.ids == expected_answer(prompt(4), 6)
    assert long.ids == expected_answer(prompt(25, 4), 2)


def test_unfinished_prompts_come_before_new_ones() -> None:
    driver = Driver(capacity=make_capacity(budget=8), run_ahead_depth=1)
    driver.submit(make_submit(1, prompt(12)))
    driver.step()
    driver.submit(make_submit(2, prompt(12, 4)))
    assert driver.rows(driver.step()) == [(0, 4), (1, 4)]


def test_decodes_beyond_the_budget_wait_and_everyone_ends() -> None:
    driver = Driver(capacity=make_capacity(budget=3))
    seen = [driver.submit(make_submit(key, prompt(1, 3 + key))) for key in range(6)]
    driver.run()
    for key, answer in enumerate(seen):
        assert answer.ids == expected_answer(prompt(1, 3 + key), 8)


def test_decodes_beyond_the_budget_are_not_starved_by_newcomers() -> None:
    """However many come, nobody enters while someone on the worker is left out."""
    driver = Driver(capacity=make_capacity(budget=2), run_ahead_depth=2)
    early = [driver.submit(make_submit(key, prompt(1), max_tokens=20)) for key in range(5)]
    for key in range(5, 200):
        driver.submit(make_submit(key, prompt(1), max_tokens=20))
        driver.plan()
        driver.land()
    assert all(answer.ended for answer in early)
    assert driver.engine.stats().waiting > 0


def test_without_chunking_a_prompt_waits_until_it_fits_one_step() -> None:
    capacity = make_capacity(budget=32)
    card = make_card(max_model_len=32)
    driver = Driver(capacity=capacity, card=card, enable_chunked_prefill=False, run_ahead_depth=1)
    driver.submit(make_submit(1, prompt(20)))
    driver.submit(make_submit(2, prompt(20, 4)))
    driver.submit(make_submit(3, prompt(2, 5)))
    assert driver.rows(driver.step()) == [(0, 20)]
    assert driver.rows(driver.step()) == [(0, 1), (1, 20), (2, 2)]


def test_without_chunking_the_budget_must_hold_a_whole_prompt() -> None:
    settings = SchedulerSettings(enable_chunked_prefill=False)
    with pytest.raises(SettingsError, match=r"31 .*at least --max-model-len \(32\)"):
        Engine(
            "engine",
            make_card(max_model_len=32),
            make_capacity(budget=31),
            settings,
            epoch=EPOCH,
            prefix_caching=True,
        )


# -- admission ------------------------------------------------------------------------------------


def test_no_more_requests_run_than_there_are_slots() -> None:
    driver = Driver(capacity=make_capacity(max_num_seqs=4), max_num_seqs=2)
    for key in range(3):
        driver.submit(make_submit(key, prompt(2, 3 + key)))
    driver.step()
    stats = driver.engine.stats()
    assert (stats.running, stats.waiting) == (2, 1)


def test_the_gate_asks_for_the_whole_prompt_not_for_its_first_chunk() -> None:
    """Two prompts of 60% of the pool: half-computed side by side they would lock each other out."""
    driver = Driver(capacity=make_capacity(num_blocks=11, budget=8), watermark=0.0)
    first = driver.submit(make_submit(1, prompt(24), max_tokens=4))
    second = driver.submit(make_submit(2, prompt(24, 4), max_tokens=4))
    driver.step()
    assert driver.engine.stats().running == 1
    driver.run()
    assert first.ended == second.ended == ("length", None)
    assert driver.engine.stats().preemptions_total == 0


def test_the_watermark_holds_only_beside_other_requests() -> None:
    """Ten blocks, five of them reserved: alone a request may take nine, beside another one not."""
    driver = Driver(capacity=make_capacity(num_blocks=11), watermark=0.5, run_ahead_depth=1)
    driver.submit(make_submit(1, prompt(20), max_tokens=1))
    driver.submit(make_submit(2, prompt(20, 4), max_tokens=1))
    assert driver.rows(driver.step()) == [(0, 20)]
    driver.submit(make_submit(3, prompt(8, 5), max_tokens=1))
    assert driver.rows(driver.step()) == [(0, 20)]
    assert driver.rows(driver.step()) == [(0, 8)]


def test_first_come_first_served_even_if_a_later_one_would_fit() -> None:
    driver = Driver(capacity=make_capacity(num_blocks=11), watermark=0.0, run_ahead_depth=1)
    driver.submit(make_submit(1, prompt(20), max_tokens=4))
    driver.submit(make_submit(2, prompt(30, 4), max_tokens=4))
    driver.submit(make_submit(3, prompt(2, 5), max_tokens=4))
    driver.step()
    assert driver.engine.stats().waiting == 2


def test_arrival_decides_under_fcfs_and_priority_under_priority() -> None:
    order = {}
    for policy in ("fcfs", "priority"):
        driver = Driver(
            capacity=make_capacity(max_num_seqs=1), scheduling_policy=policy, run_ahead_depth=1
        )
        wishes = {1: (5, 3.0), 2: (0, 2.0), 3: (5, 1.0)}
        for key, (priority, arrival_s) in wishes.items():
            driver.submit(
                make_submit(key, prompt(key), max_tokens=1, priority=priority, arrival_s=arrival_s)
            )
        driver.run()
        order[policy] = [driver.rows(step)[0][1] for step in driver.steps if step.n_rows]
    assert order == {"fcfs": [3, 2, 1], "priority": [2, 3, 1]}


def test_too_many_waiting_is_429_and_room_is_made_by_an_abort() -> None:
    driver = Driver(max_waiting=2)
    for key in range(2):
        driver.submit(make_submit(key, prompt(3)))
    with pytest.raises(RequestError, match="2 requests with 6 prompt tokens are waiting") as caught:
        driver.submit(make_submit(2, prompt(3)))
    assert caught.value.status == 429
    driver.engine.end("tokenizer-1", [0], "abort", 0.0)
    driver.submit(make_submit(2, prompt(3)))


# -- preemption -----------------------------------------------------------------------------------


def crowded(*, policy: str = "fcfs", depth: int = 1, device: str = "cpu") -> Driver:
    """Three requests of eight tokens fill six blocks; the next decode needs one more each."""
    driver = Driver(
        capacity=make_capacity(num_blocks=7, device=device),
        watermark=0.0,
        scheduling_policy=policy,
        run_ahead_depth=depth,
        prefix_caching=False,
    )
    for key in range(3):
        driver.submit(make_submit(key, prompt(8, 3 + key), max_tokens=5, priority=2 - key))
    driver.step()
    return driver


@pytest.mark.parametrize(("policy", "victim"), [("fcfs", 2), ("priority", 0)])
def test_the_victim_is_the_latest_or_the_least_important(policy: str, victim: int) -> None:
    driver = crowded(policy=policy)
    step = driver.step()
    slot_of = {2: 2, 0: 2}  # admitted last in either order
    assert unpack_ids(step.gone) == [slot_of[victim]]
    driver.run()
    for key in range(3):
        assert driver.seen["tokenizer-1", key].ids == expected_answer(prompt(8, 3 + key), 5)
    assert driver.engine.stats().preemptions_total >= 1


def test_a_step_that_preempts_admits_nobody() -> None:
    """Even where the victim leaves more room than the others need."""
    driver = Driver(capacity=make_capacity(num_blocks=7), watermark=0.0, run_ahead_depth=1)
    driver.submit(make_submit(1, prompt(8), max_tokens=9))
    driver.submit(make_submit(2, prompt(16, 4), max_tokens=5))
    driver.step()
    driver.submit(make_submit(3, prompt(1, 5), max_tokens=1))
    step = driver.step()
    assert unpack_ids(step.gone) == [1]
    assert not step.new
    driver.run()


def test_preemption_is_logged_with_its_remedies(log_lines: list[EventDict]) -> None:
    for device, remedy in (("cpu", "--kv-cache-memory"), ("cuda", "--gpu-memory-utilization")):
        log_lines.clear()
        crowded(device=device).step()
        [line] = [line for line in log_lines if line["event"] == "preempted"]
        assert line["log_level"] == "warning"
        assert line["requests"] == ["request-2"]
        for word in (remedy, "--max-num-seqs", "--max-model-len", "tensor parallelism", "replicas"):
            assert word in line["remedies"]


def test_a_preempted_request_returns_only_when_everyone_can_grow() -> None:
    """When the second request ends, the third would just fit, and would be preempted again."""
    driver = Driver(capacity=make_capacity(num_blocks=6), watermark=0.0, run_ahead_depth=1)
    driver.submit(make_submit(1, prompt(4), max_tokens=6))
    driver.submit(make_submit(2, prompt(3, 4), max_tokens=2))
    driver.submit(make_submit(3, prompt(11, 5), max_tokens=3))
    driver.step()
    assert unpack_ids(driver.step().gone) == [2]
    stats = driver.engine.stats()
    assert (stats.running, stats.waiting) == (1, 1)
    assert not driver.step().new
    driver.run()
    assert driver.engine.stats().preemptions_total == 1


def test_blocks_that_a_victim_shares_are_not_freed_by_it() -> None:
    """Two requests need a block each; the fork has one of its own, so its leader goes too."""
    driver = Driver(
        capacity=make_capacity(num_blocks=7, budget=30),
        watermark=0.0,
        run_ahead_depth=1,
        prefix_caching=False,
    )
    driver.submit(make_submit(1, prompt(3), max_tokens=6))
    driver.submit(make_submit(2, prompt(3, 4), max_tokens=6))
    for choice in range(2):
        submit = make_submit(3 + choice, prompt(10, 5), max_tokens=4, group="g", choice=choice)
        driver.submit(submit)
    driver.step()
    assert len(driver.step().new) == 1
    assert driver.engine.stats().kv_usage == 1.0
    assert len(unpack_ids(driver.step().gone)) == 2
    driver.run()
    for key, n, token, n_answer in ((1, 3, 3, 6), (2, 3, 4, 6), (3, 10, 5, 4), (4, 10, 5, 4)):
        answer = driver.seen["tokenizer-1", key]
        assert answer.ids == expected_answer(prompt(n, token), n_answer)


def test_stale_results_still_bring_their_tokens_in_order() -> None:
    """The victim has two tokens in flight when it is preempted; it returns with both."""
    driver = Driver(
        capacity=make_capacity(num_blocks=7),
        watermark=0.0,
        run_ahead_depth=3,
        prefix_caching=False,
    )
    seen = [driver.submit(make_submit(key, prompt(7, 3 + key), max_tokens=5)) for key in range(3)]
    for _ in range(3):
        driver.plan()
    assert [len(answer.ids) for answer in seen] == [0, 0, 0]
    assert driver.engine.stats().preemptions_total == 1
    assert driver.engine.stats().waiting == 1
    assert driver.plan() is None
    driver.land()
    driver.land()
    assert [len(answer.ids) for answer in seen] == [2, 2, 2]
    driver.run()
    for key, answer in enumerate(seen):
        assert answer.ids == expected_answer(prompt(7, 3 + key), 5)
    [new] = [new for step in driver.steps[3:] for new in step.new]
    assert len(unpack_ids(new.ids)) == 7 + 2


def test_a_preempted_request_waits_for_its_stale_results_even_if_there_is_room() -> None:
    driver = Driver(
        capacity=make_capacity(num_blocks=7),
        watermark=0.0,
        run_ahead_depth=4,
        prefix_caching=False,
    )
    for key in range(3):
        driver.submit(make_submit(key, prompt(7, 3 + key), max_tokens=5))
    for _ in range(3):
        driver.plan()
    driver.engine.end("tokenizer-1", [0], "abort", 0.0)
    step = driver.plan()
    assert not step.new if step else True
    assert driver.engine.stats().waiting == 1
    driver.run()
    assert driver.seen["tokenizer-1", 2].ids == expected_answer(prompt(7, 5), 5)


def test_a_stale_token_may_end_a_waiting_request() -> None:
    driver = Driver(
        capacity=make_capacity(num_blocks=7),
        watermark=0.0,
        run_ahead_depth=3,
        prefix_caching=False,
    )
    answer = expected_answer(prompt(7, 5), 2)
    for key in range(3):
        driver.submit(make_submit(key, prompt(7, 3 + key), max_tokens=9, stop_token_ids=answer[1:]))
    for _ in range(3):
        driver.plan()
    driver.land()
    driver.land()
    last = driver.seen["tokenizer-1", 2]
    assert last.ids == answer
    assert last.ended == ("stop", answer[1])
    assert driver.engine.stats().waiting == 0
    driver.run()


def test_cache_hits_of_readmissions_are_counted_apart() -> None:
    driver = Driver(capacity=make_capacity(num_blocks=7), watermark=0.0, run_ahead_depth=1)
    for key in range(3):
        driver.submit(make_submit(key, prompt(8, 3 + key), max_tokens=5))
    driver.run()
    counters = driver.engine.counters
    assert counters.preemptions == 1
    assert counters.preempted_tokens == 8
    assert counters.prefix_query_tokens == 24
    assert counters.prefix_hit_tokens == 0
    assert counters.readmitted_query_tokens >= 9


# -- run-ahead ------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_as_many_steps_are_out_as_the_depth_says(depth: int) -> None:
    driver = Driver(run_ahead_depth=depth)
    driver.submit(make_submit(1, prompt(3), max_tokens=20))
    planned = 0
    while driver.plan() is not None:
        planned += 1
    assert planned == depth


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_length_stop_is_predicted(depth: int) -> None:
    """No step computes what nobody will read: the prompt once, each token but the last once."""
    driver = Driver(run_ahead_depth=depth)
    driver.submit(make_submit(1, prompt(5), max_tokens=4))
    driver.run()
    computed = sum(n for step in driver.steps for _, n in driver.rows(step))
    assert computed == 5 + 3


def test_an_end_of_sequence_is_found_late_and_its_extra_token_dropped() -> None:
    answer = expected_answer(prompt(5), 3)
    driver = Driver(run_ahead_depth=3)
    seen = driver.submit(make_submit(1, prompt(5), max_tokens=20, stop_token_ids=[answer[0]]))
    for _ in range(3):
        assert driver.plan() is not None
    driver.land()
    assert seen.ids == answer[:1]
    assert seen.ended == ("stop", answer[0])
    assert driver.engine.stats().kv_usage == 0
    driver.run()
    assert seen.ids == answer[:1]


def test_the_worker_hears_of_freed_slots_even_when_nothing_else_runs() -> None:
    driver = Driver()
    driver.submit(make_submit(1, prompt(5), max_tokens=20))
    driver.step()
    driver.engine.end("tokenizer-1", [1], "abort", 0.0)
    del driver.seen["tokenizer-1", 1]
    step = driver.step()
    assert (unpack_ids(step.gone), step.n_rows) == ([0], 0)
    assert not driver.worker.rows
    assert driver.plan() is None

"""The scheduler service over real sockets and a real Valkey, between scripted neighbours."""

from __future__ import annotations

import asyncio

import pytest
from scheduler_helpers import expected_answer, make_capacity, make_card, make_submit
from service_harness import FakeTokenizer, FakeWorker, Scheduler, Start
from structlog.typing import EventDict

from pagemesh.shared.engine_messages import StepResult
from pagemesh.shared.messages import Engines, EngineStats, EngineStatus
from pagemesh.shared.progress import StepPatience
from pagemesh.shared.wire import unpack_ids

PROMPT = [3, 4, 5, 6, 7]


@pytest.fixture
async def scheduler(start: Start) -> Scheduler:
    return await start()


async def linked(
    scheduler: Scheduler, *, held: bool = False, **capacity: int
) -> tuple[FakeWorker, FakeTokenizer]:
    """One worker and one tokenizer, who knows of it."""
    worker = await scheduler.worker("worker-1", make_card(), make_capacity(**capacity), held=held)
    tokenizer = await scheduler.tokenizer()
    await tokenizer.until_engines("worker-1")
    return worker, tokenizer


async def metric(scheduler: Scheduler, name: str, **labels: str) -> float:
    _, text = await scheduler.get("/metrics")
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    for line in text.splitlines():
        if line.startswith(f"{name}{{") and all(label in line for label in wanted):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no {name} with {labels}")


# -- requests -------------------------------------------------------------------------------------


async def test_each_tokenizer_gets_its_own_tokens(scheduler: Scheduler) -> None:
    _, first = await linked(scheduler)
    second = await scheduler.tokenizer("tokenizer-2")
    await second.until_engines("worker-1")
    a = first.submit(make_submit(1, PROMPT), "worker-1")
    b = second.submit(make_submit(1, PROMPT[::-1]), "worker-1")
    await asyncio.gather(first.until_over(a), second.until_over(b))
    assert a.ids == expected_answer(PROMPT, 8)
    assert b.ids == expected_answer(PROMPT[::-1], 8)


async def test_the_handshake_says_which_engines_there_are(scheduler: Scheduler) -> None:
    await linked(scheduler)
    late = await scheduler.tokenizer("tokenizer-2")
    [status] = late.link.peer.engines
    assert (status.engine_id, status.card, status.capacity) == (
        "worker-1",
        make_card(),
        make_capacity(),
    )


async def test_a_burst_of_requests_enters_in_one_step(scheduler: Scheduler) -> None:
    worker, tokenizer = await linked(scheduler, held=True)
    for key in range(5):
        tokenizer.submit(make_submit(key, PROMPT), "worker-1")
    await worker.until_steps(2)
    assert len(worker.steps[0].new) + len(worker.steps[1].new) == 5
    worker.resume()
    await tokenizer.until_over(*tokenizer.seen.values())


async def test_the_load_says_how_many_prompt_tokens_are_left(scheduler: Scheduler) -> None:
    """Of prompts on the worker, and of those that wait for one of its rows."""
    worker, tokenizer = await linked(scheduler, held=True, max_num_seqs=1)
    first = tokenizer.submit(make_submit(1, PROMPT), "worker-1")
    await worker.until_steps(1)
    second = tokenizer.submit(make_submit(2, PROMPT[::-1]), "worker-1")
    await tokenizer.until(lambda: tokenizer.engines[0].stats.prefill_tokens == len(PROMPT))
    worker.resume()
    await tokenizer.until_over(first, second)
    await tokenizer.until(lambda: tokenizer.engines[0].stats.prefill_tokens == 0)


@pytest.mark.parametrize("depth", [1, 3])
async def test_the_worker_has_as_many_steps_as_the_depth_says(start: Start, depth: int) -> None:
    scheduler = await start(run_ahead_depth=depth)
    worker, tokenizer = await linked(scheduler, held=True)
    answer = tokenizer.submit(make_submit(1, PROMPT, max_tokens=20), "worker-1")
    await worker.until_steps(depth)
    worker.release(1)
    await worker.until_steps(depth + 1)
    assert len(worker.steps) == depth + 1
    worker.resume()
    await tokenizer.until_over(answer)
    assert answer.ids == expected_answer(PROMPT, 20)


async def test_refusals_reach_the_sender_and_nobody_else(start: Start) -> None:
    scheduler = await start(max_waiting=1)
    worker, tokenizer = await linked(scheduler, held=True, max_num_seqs=1)
    runs = tokenizer.submit(make_submit(1, PROMPT), "worker-1")
    await worker.until_steps(1)
    too_long = tokenizer.submit(make_submit(2, [3] * 257), "worker-1")
    waits = tokenizer.submit(make_submit(3, PROMPT), "worker-1")
    one_too_many = tokenizer.submit(make_submit(4, PROMPT), "worker-1")
    await tokenizer.until_over(too_long, one_too_many)
    assert too_long.error == "context_length_exceeded"
    assert one_too_many.error == "engine_overloaded"
    worker.resume()
    await tokenizer.until_over(runs, waits)
    assert runs.ids == waits.ids == expected_answer(PROMPT, 8)


async def test_a_request_for_an_unknown_engine_is_lost_not_refused(scheduler: Scheduler) -> None:
    _, tokenizer = await linked(scheduler)
    tokenizer.submit(make_submit(1, PROMPT), "worker-9")
    await tokenizer.until(lambda: tokenizer.lost)
    assert tokenizer.lost == [("worker-9", 1)]


# -- aborts (known failures 66 and 68) ------------------------------------------------------------


@pytest.mark.parametrize("where", ["queued", "running"])
async def test_an_abort_frees_the_workers_slot_and_counts(scheduler: Scheduler, where: str) -> None:
    worker, tokenizer = await linked(scheduler, held=True, max_num_seqs=1)
    runs = tokenizer.submit(make_submit(1, PROMPT, max_tokens=100), "worker-1")
    queued = tokenizer.submit(make_submit(2, PROMPT), "worker-1")
    await worker.until_steps(1)
    tokenizer.end(1 if where == "running" else 2)
    worker.resume()
    if where == "running":
        await tokenizer.until_over(queued)
        assert runs.ids == []
    else:
        await tokenizer.until_over(runs)
        assert queued.ids == []
    await asyncio.gather(worker.until_empty(), tokenizer.until_idle())
    name = "pagemesh_engine_requests_total"
    labels = {"model_name": "tiny", "engine": "worker-1"}
    assert await metric(scheduler, name, finished_reason="abort", **labels) == 1
    assert await metric(scheduler, name, finished_reason="length", **labels) == 1


async def test_a_tokenizer_that_goes_takes_its_requests_with_it(scheduler: Scheduler) -> None:
    worker, stays = await linked(scheduler)
    goes = await scheduler.tokenizer("tokenizer-2")
    forever = goes.submit(make_submit(1, PROMPT, max_tokens=200), "worker-1")
    await goes.until(lambda: forever.ids)
    goes.link.abort("the tokenizer died")
    answer = stays.submit(make_submit(1, PROMPT), "worker-1")
    await stays.until_over(answer)
    await asyncio.gather(worker.until_empty(), stays.until_idle())
    assert answer.ids == expected_answer(PROMPT, 8)
    assert await metric(scheduler, "pagemesh_engine_requests_total", finished_reason="abort") == 1


# -- workers come and go --------------------------------------------------------------------------


async def test_requests_of_a_dead_worker_are_lost_and_go_on_elsewhere(
    scheduler: Scheduler,
) -> None:
    worker, first = await linked(scheduler, held=True)
    second = await scheduler.tokenizer("tokenizer-2")
    await second.until_engines("worker-1")
    answer = first.submit(make_submit(1, PROMPT, max_tokens=12), "worker-1")
    await worker.until_steps(2)
    second.submit(make_submit(5, PROMPT), "worker-1")
    worker.release(2)
    await first.until(lambda: len(answer.ids) == 2)
    await worker.stop()
    await first.until(lambda: first.lost)
    await second.until(lambda: second.lost)
    assert (first.lost, second.lost) == ([("worker-1", 1)], [("worker-1", 5)])
    assert first.engines == []
    assert (await scheduler.get("/ready"))[0] == 503
    await scheduler.worker("worker-2", make_card(), make_capacity())
    await first.until_engines("worker-2")
    again = make_submit(2, PROMPT, prior=answer.ids, max_tokens=12, attempt=1)
    rest = first.submit(again, "worker-2")
    await first.until_over(rest)
    assert answer.ids + rest.ids == expected_answer(PROMPT, 12)


async def test_an_engine_taken_away_and_given_back_starts_anew(scheduler: Scheduler) -> None:
    """Results of the old engine arrive after the new one has begun; they are nobody's."""
    worker, tokenizer = await linked(scheduler, held=True)
    tokenizer.submit(make_submit(1, PROMPT), "worker-1")
    await worker.until_steps(2)
    worker.send(Engines([]))
    await tokenizer.until(lambda: tokenizer.lost)
    worker.offer()
    await tokenizer.until_engines("worker-1")
    answer = tokenizer.submit(make_submit(2, PROMPT), "worker-1")
    await worker.until_steps(3)
    assert worker.steps[2].base == 0
    assert worker.steps[2].step > worker.steps[1].step
    worker.resume()
    await tokenizer.until_over(answer)
    assert answer.ids == expected_answer(PROMPT, 8)
    assert await metric(scheduler, "pagemesh_engine_failures_total") == 0


async def test_a_draining_worker_finishes_what_it_has_and_gets_nothing_new(
    scheduler: Scheduler,
) -> None:
    worker, tokenizer = await linked(scheduler, held=True)
    answer = tokenizer.submit(make_submit(1, PROMPT), "worker-1")
    await worker.until_steps(1)
    worker.offer(draining=True)
    await tokenizer.until_engines()
    tokenizer.submit(make_submit(2, PROMPT), "worker-1")
    await tokenizer.until(lambda: tokenizer.lost)
    assert tokenizer.lost == [("worker-1", 2)]
    worker.resume()
    await tokenizer.until_over(answer)
    await worker.until_empty()
    assert answer.ids == expected_answer(PROMPT, 8)


async def test_a_gap_is_mended_with_a_snapshot(scheduler: Scheduler) -> None:
    worker, tokenizer = await linked(scheduler, held=True)
    answer = tokenizer.submit(make_submit(1, PROMPT, max_tokens=20), "worker-1")
    await worker.until_steps(2)
    worker.release(1)
    worker.model.in_step = False  # as after a step that contradicted the batch
    worker.resume()
    await tokenizer.until_over(answer)
    assert answer.ids == expected_answer(PROMPT, 20)
    assert sum(step.base == 0 for step in worker.steps) == 2


async def test_an_engine_that_cannot_work_with_the_settings_is_refused(start: Start) -> None:
    scheduler = await start(enable_chunked_prefill=False)
    tokenizer = await scheduler.tokenizer()
    await scheduler.worker("worker-1", make_card(), make_capacity(budget=8))
    await scheduler.worker("worker-2", make_card(max_model_len=8), make_capacity(budget=8))
    await tokenizer.until_engines("worker-2")
    assert (await scheduler.get("/ready"))[0] == 200


# -- failures -------------------------------------------------------------------------------------


async def test_a_broken_engine_fails_its_requests_loudly_and_goes_on(
    scheduler: Scheduler, log_lines: list[EventDict]
) -> None:
    worker, tokenizer = await linked(scheduler, held=True)
    beside = await scheduler.worker("worker-2", make_card(), make_capacity(), held=True)
    await tokenizer.until_engines("worker-1", "worker-2")
    broken = tokenizer.submit(make_submit(1, PROMPT), "worker-1")
    healthy = tokenizer.submit(make_submit(2, PROMPT), "worker-2")
    await asyncio.gather(worker.until_steps(1), beside.until_steps(1))
    worker.send(StepResult(worker.steps[0].epoch, 99, b""))
    await tokenizer.until_over(broken)
    assert broken.error == "engine_failure"
    assert any(line["event"] == "engine_failed" for line in log_lines)
    worker.resume()
    beside.resume()
    again = tokenizer.submit(make_submit(3, PROMPT), "worker-1")
    await tokenizer.until_over(healthy, again)
    assert healthy.ids == again.ids == expected_answer(PROMPT, 8)
    assert await metric(scheduler, "pagemesh_engine_failures_total", engine="worker-1") == 1
    assert await metric(scheduler, "pagemesh_engine_failures_total", engine="worker-2") == 0


async def test_an_offer_that_cannot_be_taken_in_costs_the_link_and_no_more(
    scheduler: Scheduler, log_lines: list[EventDict]
) -> None:
    worker, tokenizer = await linked(scheduler)
    nameless = make_card()._replace(names=[])
    nobodys = EngineStatus("worker-1", nameless, make_capacity(), EngineStats())
    worker.send(Engines([nobodys]))
    await tokenizer.until_engines()
    await tokenizer.until_engines("worker-1")
    assert any(line["event"] == "worker_link_failed" for line in log_lines)
    answer = tokenizer.submit(make_submit(1, PROMPT), "worker-1")
    await tokenizer.until_over(answer)
    assert answer.ids == expected_answer(PROMPT, 8)


async def test_refusals_are_logged_for_debugging_only(
    scheduler: Scheduler, log_lines: list[EventDict]
) -> None:
    """One request may have thousands of choices."""
    _, tokenizer = await linked(scheduler)
    await tokenizer.until_over(tokenizer.submit(make_submit(1, [3] * 257), "worker-1"))
    [line] = [line for line in log_lines if line["event"] == "request_refused"]
    assert line["log_level"] == "debug"


async def test_a_worker_that_is_overdue_shows_in_ready_and_is_ejected(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its link lives, and it does nothing about it. What it had goes on elsewhere."""
    assert (await scheduler.get("/ready"))[0] == 503
    worker, tokenizer = await linked(scheduler)
    assert (await scheduler.get("/ready"))[0] == 200
    await tokenizer.until_over(tokenizer.submit(make_submit(1, PROMPT), "worker-1"))
    worker.held = True
    monkeypatch.setattr(StepPatience, "limit_s", lambda *_: 2.0)
    tokenizer.submit(make_submit(2, PROMPT), "worker-1")
    while (ready := await scheduler.get("/ready"))[0] == 200:
        pass
    assert "worker-1 has been at one step for" in ready[1]
    assert await metric(scheduler, "pagemesh_oldest_step_age_seconds") > 0
    await tokenizer.until(lambda: tokenizer.lost)
    assert tokenizer.lost == [("worker-1", 2)]
    _, text = await scheduler.get("/metrics")
    assert "pagemesh_worker_ejections_total 1.0" in text.splitlines()
    assert tokenizer.engines == []


# -- reports --------------------------------------------------------------------------------------


async def test_load_is_pushed_and_shown(scheduler: Scheduler) -> None:
    worker, tokenizer = await linked(scheduler, held=True, max_num_seqs=2)
    for key in range(3):
        tokenizer.submit(make_submit(key, PROMPT), "worker-1")
    await worker.until_steps(1)
    await tokenizer.until(lambda: tokenizer.engines[0].stats.running == 2)
    assert tokenizer.engines[0].stats.waiting == 1
    assert tokenizer.engines[0].stats.kv_usage > 0
    labels = {"model_name": "tiny", "engine": "worker-1"}
    assert await metric(scheduler, "vllm:num_requests_running", **labels) == 2
    assert await metric(scheduler, "vllm:num_requests_waiting", **labels) == 1
    assert await metric(scheduler, "vllm:gpu_cache_usage_perc", **labels) > 0
    assert await metric(scheduler, "vllm:num_preemptions_total", **labels) == 0
    worker.resume()
    await tokenizer.until_over(*tokenizer.seen.values())
    await tokenizer.until_idle()


async def test_draining_sends_newcomers_away_and_waits_for_the_rest(scheduler: Scheduler) -> None:
    worker, tokenizer = await linked(scheduler, held=True)
    answer = tokenizer.submit(make_submit(1, PROMPT), "worker-1")
    await worker.until_steps(1)
    assert scheduler.service is not None
    drained = asyncio.create_task(scheduler.service.drain())
    await tokenizer.until(lambda: tokenizer.draining)
    tokenizer.submit(make_submit(2, PROMPT), "worker-1")
    await tokenizer.until(lambda: tokenizer.lost)
    assert not drained.done()
    assert "draining" in (await scheduler.get("/ready"))[1]
    worker.resume()
    await tokenizer.until_over(answer)
    await drained
    assert answer.ids == expected_answer(PROMPT, 8)
    assert unpack_ids(worker.steps[-1].gone) == [0]


async def test_a_drain_that_takes_too_long_gives_its_requests_up(scheduler: Scheduler) -> None:
    worker, tokenizer = await linked(scheduler, held=True)
    tokenizer.submit(make_submit(1, PROMPT), "worker-1")
    await worker.until_steps(1)
    assert scheduler.service is not None
    drained = asyncio.create_task(scheduler.service.drain())
    await tokenizer.until(lambda: tokenizer.draining)
    drained.cancel()
    with pytest.raises(StopAsyncIteration):
        await tokenizer.until(lambda: False)
    worker.resume()

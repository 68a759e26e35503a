"""Steps that are launched before those in front of them have landed, as on a GPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from worker_harness import GREEDY, alone
from worker_service_harness import PROMPT, driver, held

from pagemesh.shared.engine_messages import NeedSnapshot, StepResult
from pagemesh.worker_svc.device_lost import DeviceLost, loses_device
from pagemesh.worker_svc.models.decoder import Decoder

FAULT = "CUDA error: an illegal memory access was encountered\nCompile with ..."


async def test_steps_are_launched_ahead_and_land_in_order(
    start: Callable, decoder: Decoder
) -> None:
    async with held(start, decoder) as on:
        steps = [on.books.plan({0: n}) for n in (4, 1, 1)]
        for step in steps:
            on.scheduler.link.send(step)
            assert await on.launched() == 1  # though nothing has landed
        tokens = []
        for step in steps:
            on.executor.let_go()
            result = await on.scheduler.next()
            assert isinstance(result, StepResult)
            assert result.step == step.step
            tokens += on.books.sampled(step, result).values()
        assert tokens == alone(decoder, PROMPT, GREEDY, 3)


async def test_what_needs_no_device_waits_its_turn(start: Callable, decoder: Decoder) -> None:
    """A step without rows and one that does not follow are answered behind the one in flight."""
    async with held(start, decoder) as on:
        on.scheduler.link.send(on.books.plan({0: 4}))
        on.scheduler.link.send(on.books.plan({}))
        on.books.plan({0: 1})  # lost
        on.scheduler.link.send(on.books.plan({0: 1}))
        await on.launched()
        on.executor.let_go()
        assert await on.scheduler.tokens() == alone(decoder, PROMPT, GREEDY, 1)
        assert await on.scheduler.tokens() == []
        assert await on.scheduler.next(NeedSnapshot) == NeedSnapshot(1, 2)


async def test_drain_waits_for_what_is_in_flight(start: Callable, decoder: Decoder) -> None:
    async with held(start, decoder) as on:
        on.scheduler.link.send(on.books.plan({0: 4}))
        on.books.leave(0)
        on.scheduler.link.send(on.books.plan({}))
        await on.launched()
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await on.scheduler.engines()).draining
        assert not on.worker.task.done()
        on.executor.let_go()
        assert await on.scheduler.tokens() == alone(decoder, PROMPT, GREEDY, 1)
        await on.worker.task


async def test_another_scheduler_takes_over_while_steps_are_in_flight(
    start: Callable, decoder: Decoder
) -> None:
    async with held(start, decoder) as on:
        await on.launch(4, 1)
        await on.scheduler.link.close()
        async with on.worker.scheduler("young", term=2) as young:
            for _ in range(3):
                on.executor.let_go()
            await young.engines()  # what was in flight has landed
            theirs = driver(epoch=7)
            theirs.enter(0, PROMPT[1:])
            young.link.send(theirs.plan({0: 3}))
            await on.launched()
            assert await young.tokens() == alone(decoder, PROMPT[1:], GREEDY, 1)


async def test_a_result_that_cannot_be_read_costs_the_link_and_no_more(
    start: Callable, decoder: Decoder
) -> None:
    async with held(start, decoder) as on:
        await on.launch(4, 1)
        on.executor.let_go(AssertionError("a bug"))
        assert await on.scheduler.ended()
        on.executor.let_go()
        async with on.worker.scheduler() as again:
            await again.engines()
            again.link.send(driver().plan({}))
            assert await again.tokens() == []
        assert not on.worker.task.done()


async def test_a_lost_device_costs_the_link_and_ends_the_process(
    start: Callable, decoder: Decoder
) -> None:
    async with held(start, decoder) as on:
        await on.launch(4, 1)
        for _ in range(2):
            on.executor.let_go(RuntimeError(FAULT))
        assert await on.scheduler.ended()
        with pytest.raises(DeviceLost, match=r"lost in step 1: CUDA error: an illegal .*ered$"):
            await on.worker.task


@pytest.mark.parametrize("call", ["enter", "compute", "commit"])
async def test_a_device_that_is_lost_while_a_step_is_launched_ends_the_process(
    start: Callable, decoder: Decoder, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Triton Error [CUDA]: device-side assert triggered")

    async with held(start, decoder) as on:
        monkeypatch.setattr(on.executor, call, fail)
        on.scheduler.link.send(on.books.plan({0: 4}))
        assert await on.scheduler.ended()
        with pytest.raises(DeviceLost, match="device-side assert"):
            await on.worker.task


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError(FAULT), True),
        (RuntimeError("CUDA error: out of memory"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling it"), True),
        (RuntimeError("shape '[2]' is invalid for input of size 3"), False),
        (ValueError("CUDA error: quoted by a caller"), False),
    ],
)
def test_which_errors_never_heal(error: Exception, lost: bool) -> None:
    assert loses_device(error) == lost

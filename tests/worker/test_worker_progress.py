"""Threads that compute, and that stop to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs
from worker_harness import GREEDY, alone
from worker_service_harness import PROMPT, gated

from pagemesh.shared import progress as shared_progress
from pagemesh.shared.engine_messages import Step
from pagemesh.shared.errors import Stalled
from pagemesh.worker_svc import progress
from pagemesh.worker_svc.models.decoder import Decoder
from pagemesh.worker_svc.progress import ComputeProgress

TIMEOUT_S = 10.0


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: self.now_s))


@pytest.fixture
async def answered() -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.set_result(None)
    return future


class Watched:
    """A worker's progress, looked at as often as it is in life."""

    def __init__(self, clock: Clock, probe: Callable[[], asyncio.Future[None]]) -> None:
        self.progress = ComputeProgress(TIMEOUT_S)
        self._clock, self._probe = clock, probe

    def begin(self, *steps: int) -> None:
        for step in steps:
            self.progress.begun(Step(1, step, step - 1, 1, 1))

    def live(self, seconds: float) -> None:
        for _ in range(round(seconds / shared_progress.LOOK_S)):
            self._clock.now_s += shared_progress.LOOK_S
            self.progress.look(self._probe)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, answered: asyncio.Future[None]) -> Watched:
    watched = Watched(Clock(monkeypatch), lambda: answered)
    watched.begin(1)
    watched.progress.landed(0.1)
    return watched


async def test_a_step_is_slow_and_then_stalled_by_the_time_it_has_for_itself(
    watched: Watched,
) -> None:
    watched.begin(2, 3)
    watched.live(0.4 * TIMEOUT_S)
    assert watched.progress.slow() is None
    watched.progress.landed(0.1)
    watched.live(0.4 * TIMEOUT_S)
    assert watched.progress.slow() is None
    watched.live(0.3 * TIMEOUT_S)
    assert watched.progress.slow() == "a step has been computing for 6 s"
    assert watched.progress.stalled() is None
    watched.live(0.5 * TIMEOUT_S)
    assert watched.progress.stalled() == "a step has been computing for 12 s"


async def test_a_process_that_was_stopped_is_not_stalled(watched: Watched) -> None:
    watched.begin(2)
    watched.live(0.4 * TIMEOUT_S)
    watched._clock.now_s += 100 * TIMEOUT_S
    watched.live(shared_progress.LOOK_S)
    assert watched.progress.slow() is None


async def test_an_idle_worker_is_ready_for_as_long_as_its_threads_answer(
    monkeypatch: pytest.MonkeyPatch, answered: asyncio.Future[None]
) -> None:
    probes = [answered, asyncio.get_running_loop().create_future()]
    watched = Watched(Clock(monkeypatch), lambda: probes.pop(0))
    watched.live(0.7 * TIMEOUT_S)
    assert watched.progress.slow() == "the compute threads have not answered for 6 s"
    assert not probes


async def test_a_step_that_hangs_costs_the_link_and_ends_the_process(
    start: Callable, decoder: Decoder, capfd: pytest.CaptureFixture[str]
) -> None:
    with capture_logs() as entries:
        async with gated(start, decoder, step_timeout_s=2.0) as (gate, worker, scheduler, books):
            gate.open.set()
            scheduler.link.send(books.plan({0: 4}))
            assert await scheduler.tokens() == alone(decoder, PROMPT, GREEDY, 1)
            assert (await worker.get("/ready"))[0] == 200
            gate.open.clear()
            scheduler.link.send(books.plan({0: 1}))
            while (ready := await worker.get("/ready"))[0] == 200:
                pass
            assert "a step has been computing for" in ready[1]
            assert await scheduler.ended()
            with pytest.raises(Stalled, match="a step has been computing for"):
                await worker.task
            gate.open.set()
    [slow] = [entry for entry in entries if entry["event"] == "step_stuck"]
    assert "in forward" in slow["stack"]
    assert "in forward" in capfd.readouterr().err

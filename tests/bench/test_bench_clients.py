"""When one client process is the limit: noticed, and the run started over with more."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from bench_command import SMALL, Bench
from scripted_server import Reply, ScriptedServer, obedient

from pagemesh.bench import client_load, processes
from pagemesh.bench.client import ClientSaturated, Job, Share, Target, run_share
from pagemesh.bench.client_limit import client_limits
from pagemesh.bench.client_load import ClientLoad, CpuWindow
from pagemesh.bench.processes import most_clients, split

_WARMUP_PROMPT_TOKENS = 32


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    return Bench(tmp_path, capsys)


def window(*marks: tuple[float, float]) -> CpuWindow:
    filled = CpuWindow()
    for wall_s, cpu_s in marks:
        filled.add(wall_s, cpu_s)
    return filled


def test_a_window_is_saturated_once_it_is_full_and_busy() -> None:
    assert not window().is_saturated
    assert not window((10.0, 0.0), (11.0, 1.0)).is_saturated  # busy, but only for a second
    assert window((10.0, 0.0), (11.0, 0.9), (12.0, 1.8)).is_saturated
    assert not window((10.0, 0.0), (11.0, 0.8), (12.0, 1.6)).is_saturated


def test_a_window_forgets_what_is_older_than_it() -> None:
    idle_then_busy = [(float(s), max(s - 100.0, 0.0)) for s in range(103)]
    assert window(*idle_then_busy).is_saturated
    busy_then_idle = [(float(s), min(float(s), 100.0)) for s in range(103)]
    assert not window(*busy_then_idle).is_saturated


def test_clients_are_no_more_than_cores_requests_and_concurrency(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes.os, "cpu_count", lambda: 4)
    assert most_clients(100, None) == 4
    assert most_clients(3, None) == 3
    assert most_clients(100, 2) == 2
    monkeypatch.setattr(processes.os, "cpu_count", lambda: None)
    assert most_clients(100, None) == 1


def test_shares_keep_every_job_and_the_whole_concurrency() -> None:
    jobs = [Job(index, float(index), b"", 1, 1) for index in range(7)]
    shares = split(Target("", {}, 1.0), jobs, 5, 3)
    assert sorted(job.index for share in shares for job in share.jobs) == list(range(7))
    assert sum(share.max_concurrency or 0 for share in shares) == 5
    assert all(job.arrival_s == job.index for share in shares for job in share.jobs)


@pytest.fixture
def saturated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any client of this process is the limit as soon as it looks at itself; two cores."""
    monkeypatch.setattr(client_load, "SATURATED_FOR_S", 0.0)
    monkeypatch.setattr(client_load, "SATURATED_CPU_SHARE", 0.0)
    monkeypatch.setattr(processes.os, "cpu_count", lambda: 2)


class HoldsFirstStart:
    """Answers warm-ups; a measured request only once a second start has warmed up."""

    def __init__(self) -> None:
        self.n_warmups = 0
        self._again = asyncio.Event()

    async def __call__(self, reply: Reply) -> web.StreamResponse:
        if len(reply.body["prompt"]) == _WARMUP_PROMPT_TOKENS:
            self._count_warmup()
        elif self.n_warmups == 1:
            await self._again.wait()
        return await obedient(reply)

    def _count_warmup(self) -> None:
        self.n_warmups += 1
        if self.n_warmups == 2:
            self._again.set()


@pytest.mark.usefixtures("saturated_at_once")
async def test_a_saturated_client_gives_up_only_where_that_helps() -> None:
    play = HoldsFirstStart()
    play.n_warmups = 1
    async with ScriptedServer(play).running() as server:
        target = Target(f"{server.url}/v1/completions", {}, 30.0)
        jobs = [Job(0, 0.0, b'{"prompt": [1], "max_tokens": 1, "stream": true}', 1, 1)]
        with pytest.raises(ClientSaturated):
            await run_share(Share(target, jobs, None, gives_up=True), 0.0, lambda _: None)
        play.n_warmups = 2
        kept = await run_share(Share(target, jobs, None, gives_up=False), 0.0, lambda _: None)
    assert [record.failure for record in kept.records] == [None]


@pytest.mark.usefixtures("saturated_at_once")
async def test_a_run_that_one_client_limits_starts_over_with_two(bench: Bench) -> None:
    play = HoldsFirstStart()
    server = ScriptedServer(play)
    ran = await bench(server, *SMALL, "--num-prompts", "5")
    assert ran.exit_code == 0
    assert play.n_warmups == 2
    assert (ran.figures["completed"], ran.figures["failed"]) == (5, 0)
    assert ran.figures["total_output_tokens"] == 15
    client = ran.figures["client"]
    assert (client["processes"], client["restarts"]) == (2, 1)
    assert "the run was started over with 2" in ran.out
    measured = [tuple(body["prompt"]) for body in server.streamed if len(body["prompt"]) == 6]
    assert len(set(measured)) == len(measured)  # nothing sent before the restart is sent again
    repeated = ScriptedServer()
    flags = ("--num-prompts", "5", "--clients", "2", "--seed", str(ran.figures["seed"]))
    await bench(repeated, *SMALL, *flags)
    assert set(measured[-5:]) < {tuple(body["prompt"]) for body in repeated.streamed}


@pytest.mark.usefixtures("saturated_at_once")
async def test_a_number_of_clients_is_kept_to(bench: Bench) -> None:
    ran = await bench(ScriptedServer(), *SMALL, "--num-prompts", "5", "--clients", "1")
    assert (ran.figures["client"]["processes"], ran.figures["client"]["restarts"]) == (1, 0)


def test_without_cores_left_the_report_asks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.os, "cpu_count", lambda: 2)
    (with_one,) = client_limits(ClientLoad(cpu_share=0.95), n_clients=1)
    (with_two,) = client_limits(ClientLoad(cpu_share=0.95), n_clients=2)
    assert "Give --clients 2" in with_one
    assert "no cores for more" in with_two

"""`--autoscale`: what it accepts, and which workers it starts and stops."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any, Final

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pagemesh import autoscale, launcher
from pagemesh.autoscale import Autoscaler, Bounds, bounds_of, change, check_cores, with_most_workers
from pagemesh.gateway_series import GatewaySeries, Workers, most, read_workers
from pagemesh.idle_gpus import VISIBLE
from pagemesh.shared.errors import SettingsError
from pagemesh.shared.registry import Instance, Load, Registry
from pagemesh.shared.settings import (
    GatewaySettings,
    MeshSettings,
    ModelSettings,
    ParallelSettings,
    Settings,
)
from pagemesh.supervisor import FIRST_BACKOFF_S, ChildSpec, Supervisor

GRACE_S: Final = 10.0
PAUSE: Final = "import signal\nwhile True: signal.pause()"
TEXT: Final = """
# TYPE pagemesh:desired_workers gauge
pagemesh:desired_workers{model_name="tiny"} 3.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="tiny",engine="a"} 0.0
vllm:num_requests_running{model_name="tiny",engine="b"} 5.0
"""


def settings_of(text: str | None, device: Any = "cpu", **mesh: Any) -> Settings:
    return Settings(
        gateway=GatewaySettings(port=0),
        mesh=MeshSettings(autoscale=text, **mesh),
        parallel=ParallelSettings(device=device),
    )


def test_a_range_is_two_numbers() -> None:
    assert bounds_of(settings_of(None)) is None
    assert bounds_of(settings_of("1:4")) == Bounds(1, 4)
    assert bounds_of(settings_of("2:2")) == Bounds(2, 2)


@pytest.mark.parametrize("text", ["", "4", "4:1", "0:2", "1:", "-1:2", "1:2:3", "a:b", "1.0:2"])
def test_nonsense_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(SettingsError, match=r"is no MIN:MAX: give two numbers") as caught:
        bounds_of(settings_of(text))
    assert caught.value.key == "autoscale"


def test_a_number_of_workers_beside_it_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"--workers 2 and --autoscale 1:4 contradict"):
        bounds_of(settings_of("1:4", workers=2))


def test_several_models_are_refused() -> None:
    several = replace(settings_of("1:2"), model=ModelSettings(models=["a", "b"]))
    with pytest.raises(SettingsError, match=r"--autoscale 1:2 is for the workers of one model"):
        bounds_of(several)


@pytest.mark.parametrize(("device", "visible"), [("auto", "0,1"), ("cuda", "0")])
async def test_more_than_the_gpus_are_refused_before_anything_starts(
    device: str, visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE, visible)
    with pytest.raises(SettingsError, match=r"--autoscale 1:3 need a GPU each, and \d can"):
        await launcher._serve(settings_of("1:3", device))


async def test_more_than_the_cores_are_refused_where_the_cpu_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(autoscale, "usable_cores", lambda: 2)
    with pytest.raises(SettingsError, match=r"--autoscale 1:3 is more than the 2 cores"):
        await launcher._serve(settings_of("1:3"))
    check_cores(Bounds(1, 2), [])
    check_cores(Bounds(1, 3), ["0", "1", "2"])
    check_cores(None, [])


def test_a_worker_divides_the_machine_by_the_most_there_may_be() -> None:
    settings = settings_of("1:4")
    assert with_most_workers(settings, bounds_of(settings)).mesh.workers == 4
    assert with_most_workers(settings, None) is settings


numbers = st.sets(st.integers(0, 7))


@given(numbers, numbers, st.integers(1, 8))
def test_a_change_leads_to_what_is_wanted_on_devices_that_are_free(
    running: set[int], leaving: set[int], wanted: int
) -> None:
    leaving -= running
    start, stop = change(running, leaving, wanted, high=8)
    assert not {*start} & (running | leaving)
    assert {*stop} <= running
    assert not (start and stop)
    after = (running | {*start}) - {*stop}
    n_possible = 8 - len(leaving)
    assert len(after) == min(wanted, n_possible) or not running | leaving
    assert after <= set(range(8))


def test_of_several_gateways_the_largest_figures_hold() -> None:
    assert read_workers(TEXT) == Workers(3, 2)
    assert read_workers("") is None
    assert most([Workers(1, 2), Workers(3, 1)]) == Workers(3, 2)
    assert most([]) is None


async def test_gateways_are_asked_for_two_series(redis_url: str, mesh_name: str) -> None:
    asked = []

    async def metrics(request: web.Request) -> web.Response:
        asked.append(request.query.getall("name[]"))
        return web.Response(text=TEXT)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    registry = Registry(redis_url, mesh_name)
    async with aiohttp.ClientSession() as session:
        series = GatewaySeries(registry, session, "http")
        assert await series.workers() is None
        for name, address in (("one", f"{host}:{port}"), ("gone", "127.0.0.1:1")):
            await registry._beat(Instance("gateway", name, address, 1), Load())
        assert await series.workers() == Workers(3, 2)
    assert asked == [["pagemesh:desired_workers", "vllm:num_requests_running"]]
    await registry.close()
    await runner.cleanup()


class Scaled:
    """Real processes that do nothing, and the scaler that starts and stops them."""

    def __init__(self, low: int, high: int) -> None:
        self.supervisor = Supervisor(lambda *_: None)
        specs = [
            ChildSpec(f"worker-{n}", (sys.executable, "-c", PAUSE), dict(os.environ))
            for n in range(1, high + 1)
        ]
        self.group = self.supervisor.start(*specs[:low])
        self.scaler = Autoscaler(self.supervisor, self.group, specs, Bounds(low, high), GRACE_S)

    @property
    def names(self) -> list[str]:
        return sorted(child.spec.name for child in self.group)

    async def until(self, *names: str) -> None:
        async with asyncio.timeout(GRACE_S):
            while self.names != [*names]:  # noqa: ASYNC110 -- a group tells no changes
                await asyncio.sleep(0.02)


async def test_workers_follow_the_figure_within_their_bounds() -> None:
    mesh = Scaled(1, 3)
    try:
        mesh.supervisor.mark_ready()
        mesh.scaler.follow(desired=9, engines=1)
        assert mesh.names == ["worker-1", "worker-2", "worker-3"]
        # Two of them load yet; the one at work may be the only one.
        mesh.scaler.follow(desired=1, engines=1)
        mesh.scaler.follow(desired=1, engines=2)
        assert mesh.names == ["worker-1", "worker-2", "worker-3"]
        mesh.scaler.follow(desired=2, engines=3)
        await mesh.until("worker-1", "worker-2")
        mesh.scaler.follow(desired=0, engines=2)
        await mesh.until("worker-1")
        mesh.scaler.follow(desired=2, engines=1)
        await mesh.until("worker-1", "worker-2")
    finally:
        await mesh.supervisor.stop(GRACE_S)


async def test_the_mesh_goes_on_when_one_was_stopped_for_good() -> None:
    mesh = Scaled(2, 2)
    watching = asyncio.create_task(mesh.supervisor.watch())
    try:
        mesh.supervisor.mark_ready()
        kept, leaver = mesh.group
        await mesh.supervisor.retire(mesh.group, leaver, GRACE_S)
        await asyncio.sleep(FIRST_BACKOFF_S * 2)
        assert mesh.group == [kept]
        assert leaver.retired
        assert not watching.done()
    finally:
        watching.cancel()
        await mesh.supervisor.stop(GRACE_S)

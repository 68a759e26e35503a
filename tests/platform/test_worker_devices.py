"""Each of several workers on a machine has a GPU of its own, or none of them has one."""

from __future__ import annotations

from typing import Any

import pytest

from pagemesh import launcher, worker_devices
from pagemesh.children import service_specs
from pagemesh.idle_gpus import VISIBLE, Gpu
from pagemesh.shared.errors import SettingsError
from pagemesh.shared.settings import (
    GatewaySettings,
    MeshSettings,
    ModelSettings,
    ParallelSettings,
    Settings,
)
from pagemesh.worker_devices import device_names, divide_devices

GPUS = [Gpu("0", "GPU-aa11", 4), Gpu("1", "GPU-bb22", 4)]


def settings_of(n_workers: int, device: Any = "auto") -> Settings:
    return Settings(
        gateway=GatewaySettings(port=0),
        mesh=MeshSettings(workers=n_workers),
        model=ModelSettings(model="/no/such/model"),
        parallel=ParallelSettings(device=device),
    )


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (None, ["GPU-aa11", "GPU-bb22"]),
        ("1,0", ["1", "0"]),
        ("MIG-1, GPU-bb", ["MIG-1", "GPU-bb"]),
        ("1,-1,0", ["1"]),
        ("", []),
    ],
)
def test_devices_are_those_that_the_parent_was_given(chosen: str | None, names: list[str]) -> None:
    assert device_names(GPUS, {} if chosen is None else {VISIBLE: chosen}) == names


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_each_worker_has_one_of_its_own(device: str) -> None:
    settings = settings_of(2, device)
    devices = divide_devices(settings, ["5", "3", "1"])
    specs = service_specs("worker", settings, devices)
    assert [spec.name for spec in specs] == ["worker-1", "worker-2"]
    assert [spec.environ[VISIBLE] for spec in specs] == ["5", "3"]
    assert VISIBLE not in service_specs("scheduler", settings, devices)[0].environ


def test_without_gpus_the_workers_share_the_cpu() -> None:
    assert divide_devices(settings_of(2), []) == []


@pytest.mark.parametrize(("device", "visible"), [("auto", "0,1"), ("cuda", "0"), ("cuda", "")])
async def test_more_workers_than_devices_are_refused_before_anything_starts(
    device: str, visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE, visible)
    with pytest.raises(SettingsError, match=r"--workers 3 need a GPU each, and \d can") as caught:
        await launcher._serve(settings_of(3, device))
    assert caught.value.key == "workers"


@pytest.mark.parametrize("settings", [settings_of(1, "cuda"), settings_of(4, "cpu")])
async def test_nobody_is_asked_where_there_is_nothing_to_divide(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def asked() -> list[Gpu]:
        raise AssertionError("asked")

    monkeypatch.setattr(worker_devices, "list_gpus", asked)
    assert await worker_devices.worker_devices(settings) == []


async def test_all_gpus_of_the_machine_are_divided_unless_some_were_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def listed() -> list[Gpu]:
        return GPUS

    monkeypatch.setattr(worker_devices, "list_gpus", listed)
    monkeypatch.delenv(VISIBLE, raising=False)
    assert await worker_devices.worker_devices(settings_of(2)) == ["GPU-aa11", "GPU-bb22"]
    monkeypatch.setenv(VISIBLE, "7,8")
    assert await worker_devices.worker_devices(settings_of(2)) == ["7", "8"]

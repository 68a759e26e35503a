"""Which GPU each of several workers of this machine computes on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import takewhile

from pagemesh.idle_gpus import VISIBLE, Gpu, list_gpus
from pagemesh.shared.errors import SettingsError
from pagemesh.shared.model_list import listed_models, n_workers
from pagemesh.shared.settings import Settings


async def worker_devices(settings: Settings) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each worker; none of them when one worker sees what this process
    does, or when all compute on the CPU. Raises SettingsError when there are too few."""
    if n_workers(settings) == 1 or settings.parallel.device == "cpu":
        return []
    gpus = [] if VISIBLE in os.environ else await list_gpus()
    return divide_devices(settings, device_names(gpus, os.environ))


def device_names(gpus: list[Gpu], environ: Mapping[str, str]) -> list[str]:
    """As CUDA knows them: what CUDA_VISIBLE_DEVICES lists, up to the first that is none, or all
    `gpus`, by names that do not depend on the order in which CUDA counts."""
    chosen = environ.get(VISIBLE)
    if chosen is None:
        return [gpu.uuid for gpu in gpus]
    names = map(str.strip, chosen.split(","))
    return list(takewhile(lambda name: name and not name.startswith("-"), names))


def divide_devices(settings: Settings, devices: list[str]) -> list[str]:
    """One of `devices` for each worker. Raises SettingsError when there are too few."""
    wanted = n_workers(settings)
    if not devices and settings.parallel.device == "auto":
        return []
    if wanted > len(devices):
        raise SettingsError(
            f"{_asked(settings)} need a GPU each, and {len(devices)} can be seen: lower it, let "
            f"{VISIBLE} list more, or take --device cpu, whose cores they share",
            key="workers" if settings.mesh.autoscale is None else "autoscale",
        )
    return devices[:wanted]


def _asked(settings: Settings) -> str:
    if settings.mesh.autoscale is not None:
        return f"--autoscale {settings.mesh.autoscale}"
    each, models = settings.mesh.workers, len(listed_models(settings.model))
    return f"--workers {each}" if models == 1 else f"{each} workers for each of {models} models"

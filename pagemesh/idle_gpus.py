"""GPUs of this machine that nobody uses, as the driver's own tool sees them: a process that only
looks after others loads no PyTorch for it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress
from shlex import quote
from typing import Final, NamedTuple

from pagemesh.shared.model_list import n_workers
from pagemesh.shared.settings import Settings

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_QUERY: Final = (
    "nvidia-smi", "--query-gpu=index,uuid,memory.used", "--format=csv,noheader,nounits",
)  # fmt: skip
_TIMEOUT_S: Final = 5.0
_IDLE_MIB: Final = 200
"""Less than any process that computes takes for CUDA alone."""


class Gpu(NamedTuple):
    number: str
    uuid: str
    used_mib: int


async def list_gpus() -> list[Gpu]:
    """None of them where the tool is missing, fails or takes too long."""
    try:
        process = await asyncio.create_subprocess_exec(
            *_QUERY, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError:
        return []
    try:
        out, _ = await asyncio.wait_for(process.communicate(), _TIMEOUT_S)
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        return []
    return parse_gpus(out.decode(errors="replace")) if process.returncode == 0 else []


def parse_gpus(text: str) -> list[Gpu]:
    """Of lines "index, uuid, MiB". What does not tell its memory is left out: nobody can say
    whether it is used."""
    gpus = []
    for line in text.splitlines():
        index, _, rest = line.partition(",")
        uuid, _, used = rest.partition(",")
        if used.strip().isdecimal():
            gpus.append(Gpu(index.strip(), uuid.strip(), int(used)))
    return gpus


def visible_gpus(gpus: list[Gpu], environ: Mapping[str, str]) -> list[Gpu]:
    """Those that CUDA would show to this process's children, in its order."""
    chosen = environ.get(VISIBLE)
    if chosen is None:
        return gpus
    found = []
    for name in map(str.strip, chosen.split(",")):
        gpu = next((gpu for gpu in gpus if _is(gpu, name)), None)
        if gpu is None:
            break  # so does CUDA
        found.append(gpu)
    return found


def _is(gpu: Gpu, name: str) -> bool:
    return name == gpu.number or (name.startswith("GPU-") and gpu.uuid.startswith(name))


def idle_hint(settings: Settings, gpus: list[Gpu]) -> str | None:
    """What to do about idle GPUs, once the mesh is up; None when there are none beside those that
    it uses, or when it is not to use any. Its workers have the first of `gpus`."""
    idle = [gpu for gpu in gpus if gpu.used_mib < _IDLE_MIB]
    if not idle or settings.parallel.device == "cpu":
        return None
    unused = f"{len(idle)} of {len(gpus)} GPUs unused"
    if len(idle) == len(gpus):
        return f"{unused}: the worker computes on the CPU; with --device cuda it says why"
    ours = [gpu for gpu in gpus[: n_workers(settings)] if gpu not in idle]
    wanted = [gpu for gpu in gpus if gpu in ours or gpu in idle]
    listed = ",".join(gpu.number for gpu in wanted)
    choice = f"{VISIBLE}={listed} " if wanted != gpus else ""
    models = settings.model.models or [settings.model.model]
    each = len(wanted) // len(models)
    if each <= settings.mesh.workers and len(models) > 1:
        return None
    return (
        f"{unused}: a worker computes on one. To have one on each, start anew with\n"
        f"  {choice}pagemesh serve {' '.join(map(quote, models))} --workers {each}"
    )


async def idle_gpus(settings: Settings) -> str | None:
    """See `idle_hint`, on this machine."""
    if settings.parallel.device == "cpu":
        return None
    return idle_hint(settings, visible_gpus(await list_gpus(), os.environ))

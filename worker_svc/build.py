"""From settings to a runner that has already generated a token, on a GPU if there is one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import structlog

from pagemesh.kernels.cpu.code_folder import CODE_FOLDER, compiling_alone
from pagemesh.shared.engine_messages import NewRow, Step
from pagemesh.shared.errors import SettingsError, StartupError
from pagemesh.shared.prepared import load_prepared, prepared_folder
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.settings import Settings
from pagemesh.shared.wire import pack_ids
from pagemesh.worker_svc.cpu_build import load_on_cpu
from pagemesh.worker_svc.gpu.card import why_not
from pagemesh.worker_svc.runner import Runner

log = structlog.get_logger(__name__)

Report = Callable[[str], None]
Device = Literal["cpu", "cuda"]


def build_runner(settings: Settings, report: Report = lambda stage: None) -> Runner:
    """Load the prepared model, divide the memory and generate a first token. Steps must be launched
    in the thread that calls.

    `report` is told what is being waited for. Raises StartupError with the sentence to show.
    """
    device = choose_device(settings)
    folder = prepared_folder(settings.model)
    prepared = load_prepared(folder)
    report(f"loading the weights of {prepared.name}")
    if device == "cuda":
        # Needs Triton, which only comes with a CUDA build of PyTorch.
        from pagemesh.worker_svc.gpu.build import load_on_gpu

        runner = load_on_gpu(settings, folder, prepared, report)
    else:
        runner = load_on_cpu(settings, folder, prepared, report)
    report("loading the kernels, which the first start on a machine compiles")
    started_s = time.perf_counter()
    with compiling_alone():
        warm_up(runner)
    seconds = round(time.perf_counter() - started_s, 1)
    log.info("kernels_ready", seconds=seconds, kept_in=str(CODE_FOLDER or "nowhere"))
    return runner


def choose_device(settings: Settings) -> Device:
    """Where this worker computes: `auto` is a GPU if one can be used. Raises SettingsError."""
    parallel, model = settings.parallel, settings.model
    if parallel.tensor_parallel_size > 1:
        raise SettingsError(
            f"--tensor-parallel-size {parallel.tensor_parallel_size} is not supported yet: "
            "use 1, and start more workers to use more devices",
            key="tensor_parallel_size",
        )
    if parallel.device == "cpu":
        return "cpu"
    reason = why_not()
    if reason is not None and parallel.device == "cuda":
        raise SettingsError(f"--device cuda cannot be used: {reason}", key="device")
    device: Device = "cpu" if reason is not None else "cuda"
    if device == "cuda" and model.quantization != "none":
        raise SettingsError(
            f"--quantization {model.quantization} is not supported on a GPU yet: leave it out, or "
            "use --device cpu",
            key="quantization",
        )
    return device


def warm_up(runner: Runner) -> None:
    """Generate one token. Raises StartupError when the model cannot."""
    card = runner.card
    first = card.bos_token_id if card.bos_token_id is not None else 0
    new = NewRow(
        slot=0,
        ids=pack_ids([first]),
        n_prompt=1,
        seed=0,
        params=SamplingParams(temperature=0.0, logprobs=1),
        blocks=pack_ids([1]),
        computed=0,
    )
    result = runner.execute(Step(0, 1, 0, n_rows=1, n_tokens=1, new=[new], chunks=pack_ids([0, 1])))
    runner.reset()
    if result.failed:
        raise StartupError(
            f"the model cannot generate a token: {result.failed[0][1]} (if compiled code may be "
            f"damaged, delete {CODE_FOLDER} and start again)"
        )
    if result.nonfinite:
        raise StartupError(
            f"the model's logits are not finite in {card.dtype}: its weights are damaged, or try "
            "--dtype float32"
        )

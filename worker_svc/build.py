"""From settings to a runner that has already generated a token, on a GPU if there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import structlog

from pagemesh.kernels.cpu.code_folder import CODE_FOLDER
from pagemesh.kernels.gpu.code_folder import keep_compiled
from pagemesh.kernels.kept_code import alone_in
from pagemesh.shared.engine_messages import NewRow, Step, StepResult
from pagemesh.shared.errors import SettingsError, StartupError
from pagemesh.shared.prepared import load_prepared, prepared_folder
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.settings import Settings
from pagemesh.shared.structured_outputs import StructuredOutputsParams
from pagemesh.shared.wire import pack_ids
from pagemesh.worker_svc.cpu_build import load_on_cpu
from pagemesh.worker_svc.gpu.card import sees_a_gpu, why_not
from pagemesh.worker_svc.runner import Runner
from pagemesh.worker_svc.stages import Report, Stages, process_began_s

log = structlog.get_logger(__name__)

Device = Literal["cpu", "cuda"]


def build_runner(
    settings: Settings, report: Report = lambda doing: None, *, own_process: bool = False
) -> Runner:
    """Load the prepared model, divide the memory and generate a first token. Steps must be launched
    in the thread that calls.

    `own_process`: this process was started for it, so that its imports count among the stages of
    the start, which are logged. Raises StartupError with the sentence to show.
    """
    stages = Stages(report, process_began_s() if own_process else None)
    device = choose_device(settings)
    folder = prepared_folder(settings.model)
    prepared = load_prepared(folder)
    code_folder = keep_compiled() if device == "cuda" else CODE_FOLDER
    if device == "cuda":
        # Needs Triton, which only comes with a CUDA build of PyTorch.
        from pagemesh.worker_svc.gpu.build import load_on_gpu

        runner = load_on_gpu(settings, folder, prepared, stages, code_folder)
    else:
        runner = load_on_cpu(settings, folder, prepared, stages)
    stages.enter("first_token", "loading the kernels, which the first start on a machine compiles")
    with alone_in(code_folder):
        warm_up(runner, code_folder)
    if own_process:
        stages.enter("rules", "reading the vocabulary for structured outputs")
        follow_a_rule(runner)
    _log_start(stages, code_folder)
    return runner


def _log_start(stages: Stages, code_folder: Path | None) -> None:
    seconds = {name: round(spent_s, 2) for name, spent_s in stages.finish().items()}
    log.info(
        "started",
        seconds=seconds,
        kernels_kept_in=str(code_folder or "nowhere"),
        table=[(name.replace("_", " "), f"{spent_s:6.2f} s") for name, spent_s in seconds.items()]
        + [("kernels are kept in", str(code_folder or "nowhere"))],
    )


def choose_device(settings: Settings) -> Device:
    """Where this worker computes: `auto` is a GPU if one can be used, and the log says why one that
    is there cannot. Raises SettingsError."""
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
    if reason is not None and sees_a_gpu():
        log.warning("gpu_left_alone", reason=reason)
    device: Device = "cpu" if reason is not None else "cuda"
    if device == "cuda" and model.quantization != "none":
        raise SettingsError(
            f"--quantization {model.quantization} is not supported on a GPU yet: leave it out, or "
            "use --device cpu",
            key="quantization",
        )
    return device


def warm_up(runner: Runner, code_folder: Path | None = None) -> None:
    """Generate one token. Raises StartupError when the model cannot. `code_folder`: of the kernels
    that do."""
    card = runner.card
    result = _one_token(runner, SamplingParams(temperature=0.0, logprobs=1))
    if result.failed:
        raise StartupError(
            f"the model cannot generate a token: {result.failed[0][1]} (if compiled code may be "
            f"damaged, delete {code_folder} and start again)"
        )
    if result.nonfinite:
        raise StartupError(
            f"the model's logits are not finite in {card.dtype}: its weights are damaged, or try "
            "--dtype float32"
        )


def follow_a_rule(runner: Runner) -> None:
    """Read the vocabulary now: that holds on to the interpreter for a second, on a busy machine for
    several, in which a process with links would be taken for frozen. A model whose vocabulary will
    not do serves all but requests with rules, which are told why."""
    _one_token(runner, SamplingParams(structured_outputs=StructuredOutputsParams(regex=".*")))


def _one_token(runner: Runner, params: SamplingParams) -> StepResult:
    card = runner.card
    first = card.bos_token_id if card.bos_token_id is not None else 0
    new = NewRow(
        slot=0,
        ids=pack_ids([first]),
        n_prompt=1,
        seed=0,
        params=params,
        blocks=pack_ids([1]),
        computed=0,
    )
    result = runner.execute(Step(0, 1, 0, n_rows=1, n_tokens=1, new=[new], chunks=pack_ids([0, 1])))
    runner.reset()
    return result

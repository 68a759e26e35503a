"""From settings to a runner on a CPU."""

from __future__ import annotations

from pathlib import Path

import structlog
import torch

from pagemesh.kernels.cpu.jit import CONVERTS_FLOAT16
from pagemesh.kernels.cpu.team import Team
from pagemesh.shared.errors import SettingsError, StartupError
from pagemesh.shared.messages import Capacity
from pagemesh.shared.prepared import PreparedModel
from pagemesh.shared.settings import CacheSettings, Settings
from pagemesh.worker_svc.books import (
    DTYPES,
    bytes_of_weights,
    model_card,
    new_batch,
    new_grammars,
)
from pagemesh.worker_svc.cores import shared_cores
from pagemesh.worker_svc.cpu_executor import CPUExecutor
from pagemesh.worker_svc.kv_cache import KVCache
from pagemesh.worker_svc.loader import load_decoder
from pagemesh.worker_svc.memory import (
    CPU_NUM_SEQS,
    MemoryPlan,
    available_bytes,
    budget_tokens,
    is_out_of_memory,
    plan_figures,
    plan_memory,
    pool_bytes_on_cpu,
    pool_line,
    show_bytes,
)
from pagemesh.worker_svc.models.config import DecoderConfig
from pagemesh.worker_svc.models.cpu_decoder import CPUDecoder
from pagemesh.worker_svc.runner import Runner
from pagemesh.worker_svc.stages import Stages

log = structlog.get_logger(__name__)


def load_on_cpu(
    settings: Settings, folder: Path, prepared: PreparedModel, stages: Stages
) -> Runner:
    """Raises StartupError or SettingsError with the sentence to show."""
    _check(settings)
    torch.set_num_threads(1)  # what is worth sharing is done by the team
    try:
        return _load(settings, folder, prepared, stages)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise _no_memory(prepared.name, str(error)) from error


def _check(settings: Settings) -> None:
    if settings.model.dtype == "float16" and not CONVERTS_FLOAT16:
        raise SettingsError(
            "--dtype float16 needs a CPU with F16C instructions: use bfloat16 or float32",
            key="dtype",
        )
    if settings.parallel.enforce_eager:
        raise SettingsError(
            "--enforce-eager has no effect on a CPU, which captures no graphs: leave it out",
            key="enforce_eager",
        )
    share = settings.cache.gpu_memory_utilization
    if share != CacheSettings().gpu_memory_utilization:
        raise SettingsError(
            f"--gpu-memory-utilization {share} has no effect on a CPU: set --kv-cache-memory, the "
            "size of the KV pool, instead",
            key="gpu_memory_utilization",
        )


def _load(settings: Settings, folder: Path, prepared: PreparedModel, stages: Stages) -> Runner:
    stages.enter("weights", f"loading the weights of {prepared.name}")
    device, dtype = torch.device("cpu"), DTYPES[settings.model.dtype]
    config = DecoderConfig.from_folder(folder)
    weights_bytes = bytes_of_weights(config, dtype)
    if weights_bytes > available_bytes():
        raise _no_memory(prepared.name, f"the weights take {show_bytes(weights_bytes)}")
    decoder = load_decoder(folder, prepared, dtype=dtype, device=device, tell=stages.doing)
    team = Team(settings.parallel.threads or shared_cores(settings.mesh.workers))
    kept_as = torch.int8 if settings.model.quantization == "int8" else dtype
    model = CPUDecoder(decoder, team, dtype=kept_as)
    stages.enter("kv_pool", "laying out the KV cache")
    plan = _plan(settings, config, dtype)
    capacity = _capacity(settings, plan, device)
    kv = KVCache(config, plan.num_blocks, plan.block_tokens, dtype, device)
    _log_division(prepared, settings.model.quantization, model.weights_bytes, plan, capacity)
    card = model_card(settings, prepared, config, plan, dtype)
    batch = new_batch(card, capacity)
    executor = CPUExecutor(
        model,
        kv,
        batch,
        vocab_tokens=card.vocab_tokens,
        eos_token_ids=card.eos_token_ids,
        team=team,
        grammars=new_grammars(folder, card),
    )
    return Runner(executor, batch, card, capacity)


def _plan(settings: Settings, config: DecoderConfig, dtype: torch.dtype) -> MemoryPlan:
    pool_bytes = pool_bytes_on_cpu(
        settings.cache.kv_cache_memory, available_bytes(), n_workers=settings.mesh.workers
    )
    return plan_memory(
        kv_bytes_per_token=KVCache.bytes_per_token(config, dtype),
        block_tokens=settings.cache.block_size,
        pool_bytes=pool_bytes,
        model_max_tokens=config.max_position_tokens,
        max_model_len=settings.model.max_model_len,
        max_num_seqs=settings.scheduler.max_num_seqs or CPU_NUM_SEQS,
    )


def _capacity(settings: Settings, plan: MemoryPlan, device: torch.device) -> Capacity:
    budget = budget_tokens(
        settings.scheduler.max_num_batched_tokens,
        chunked_prefill=settings.scheduler.enable_chunked_prefill,
        max_model_len=plan.max_model_len,
    )
    return Capacity(
        num_blocks=plan.num_blocks,
        max_num_seqs=settings.scheduler.max_num_seqs or CPU_NUM_SEQS,
        max_num_batched_tokens=budget,
        kv_bytes_per_token=plan.kv_bytes_per_token,
        device=str(device),
    )


def _no_memory(name: str, detail: str) -> StartupError:
    return StartupError(
        f"not enough memory for {name} ({detail}; {show_bytes(available_bytes())} are available): "
        "free memory, lower --kv-cache-memory or --max-num-seqs, or serve a smaller model"
    )


def _log_division(
    prepared: PreparedModel,
    quantization: str,
    weights_bytes: int,
    plan: MemoryPlan,
    capacity: Capacity,
) -> None:
    log.info(
        "memory_divided",
        model=prepared.name,
        quantization=quantization,
        weights_bytes=weights_bytes,
        budget_tokens=capacity.max_num_batched_tokens,
        **plan_figures(plan),
        table=[
            ("device", f"the CPU, {show_bytes(available_bytes())} available"),
            ("weights", show_bytes(weights_bytes)),
            ("KV pool", pool_line(plan, prepared.max_position_tokens)),
        ],
    )

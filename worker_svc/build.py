"""From settings to a runner that has already generated a token."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog
import torch

from pagemesh.kernels.cpu.code_folder import CODE_FOLDER, compiling_alone
from pagemesh.kernels.cpu.jit import CONVERTS_FLOAT16
from pagemesh.kernels.cpu.team import Team
from pagemesh.shared.engine_messages import NewRow, Step
from pagemesh.shared.errors import SettingsError, StartupError
from pagemesh.shared.messages import Capacity, ModelCard
from pagemesh.shared.prepared import PreparedModel, load_prepared, prepared_folder
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.settings import CacheSettings, ParallelSettings, Settings
from pagemesh.shared.wire import pack_ids
from pagemesh.worker_svc.batch import Batch
from pagemesh.worker_svc.cores import usable_cores
from pagemesh.worker_svc.cpu_executor import CPUExecutor
from pagemesh.worker_svc.kv_cache import KVCache
from pagemesh.worker_svc.loader import load_decoder
from pagemesh.worker_svc.memory import (
    MemoryPlan,
    available_bytes,
    budget_tokens,
    is_out_of_memory,
    plan_memory,
    pool_bytes_on_cpu,
    show_bytes,
)
from pagemesh.worker_svc.models.config import DecoderConfig
from pagemesh.worker_svc.models.cpu_decoder import CPUDecoder
from pagemesh.worker_svc.models.decoder import Decoder
from pagemesh.worker_svc.runner import Runner

log = structlog.get_logger(__name__)

Report = Callable[[str], None]
_DTYPES: Final = {
    "auto": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def build_runner(settings: Settings, report: Report = lambda stage: None) -> Runner:
    """Load the prepared model, divide the memory and generate a first token.

    `report` is told what is being waited for. Raises StartupError with the
    sentence to show.
    """
    check_supported(settings.parallel, settings.cache, settings.model.dtype)
    if settings.parallel.device == "auto" and torch.cuda.is_available():
        log.warning("gpu_not_used", device="cpu", reason="computing on a GPU is not available yet")
    torch.set_num_threads(1)  # what is worth sharing is done by the team
    folder = prepared_folder(settings.model)
    prepared = load_prepared(folder)
    report(f"loading the weights of {prepared.name}")
    try:
        runner = _load(settings, folder, prepared, report)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise _no_memory(prepared.name, str(error)) from error
    report("loading the kernels, which the first start on a machine compiles")
    started_s = time.perf_counter()
    with compiling_alone():
        warm_up(runner)
    seconds = round(time.perf_counter() - started_s, 1)
    log.info("kernels_ready", seconds=seconds, kept_in=str(CODE_FOLDER or "nowhere"))
    return runner


def check_supported(parallel: ParallelSettings, cache: CacheSettings, dtype: str = "auto") -> None:
    """Raises SettingsError for what this worker or this machine cannot do."""
    if dtype == "float16" and not CONVERTS_FLOAT16:
        raise SettingsError(
            "--dtype float16 needs a CPU with F16C instructions: use bfloat16 or float32",
            key="dtype",
        )
    if parallel.tensor_parallel_size > 1:
        raise SettingsError(
            f"--tensor-parallel-size {parallel.tensor_parallel_size} is not supported yet: "
            "use 1, and start more workers to use more devices",
            key="tensor_parallel_size",
        )
    if parallel.device == "cuda":
        raise SettingsError(
            "--device cuda is not supported yet: use --device cpu, or auto", key="device"
        )
    if cache.gpu_memory_utilization != CacheSettings().gpu_memory_utilization:
        raise SettingsError(
            f"--gpu-memory-utilization {cache.gpu_memory_utilization} has no effect on a CPU: "
            "set --kv-cache-memory, the size of the KV pool, instead",
            key="gpu_memory_utilization",
        )


def _load(settings: Settings, folder: Path, prepared: PreparedModel, report: Report) -> Runner:
    device, dtype = torch.device("cpu"), _DTYPES[settings.model.dtype]
    config = DecoderConfig.from_folder(folder)
    weights_bytes = _weights_bytes(Decoder(config, dtype=dtype, device="meta"))
    if weights_bytes > available_bytes():
        raise _no_memory(prepared.name, f"the weights take {show_bytes(weights_bytes)}")
    decoder = load_decoder(folder, prepared, dtype=dtype, device=device)
    team = Team(settings.parallel.threads or usable_cores())
    kept_as = torch.int8 if settings.model.quantization == "int8" else dtype
    model = CPUDecoder(decoder, team, dtype=kept_as)
    report("laying out the KV cache")
    plan = _plan(settings, config, dtype)
    capacity = _capacity(settings, plan, device)
    kv = KVCache(
        config.n_layers,
        plan.num_blocks,
        plan.block_tokens,
        config.n_kv_heads,
        config.head_dim,
        dtype,
        device,
    )
    _log_division(prepared.name, settings.model.quantization, model.weights_bytes, plan, capacity)
    card = _card(settings, prepared, plan, dtype)
    batch = new_batch(card, capacity)
    executor = CPUExecutor(
        model,
        kv,
        batch,
        vocab_tokens=card.vocab_tokens,
        eos_token_ids=card.eos_token_ids,
        team=team,
    )
    return Runner(executor, batch, card, capacity)


def new_batch(card: ModelCard, capacity: Capacity) -> Batch:
    return Batch(
        max_num_seqs=capacity.max_num_seqs,
        max_model_len=card.max_model_len,
        vocab_tokens=card.vocab_tokens,
        block_tokens=card.block_tokens,
        num_blocks=capacity.num_blocks,
    )


def _plan(settings: Settings, config: DecoderConfig, dtype: torch.dtype) -> MemoryPlan:
    pool_bytes = pool_bytes_on_cpu(settings.cache.kv_cache_memory, available_bytes())
    return plan_memory(
        kv_bytes_per_token=KVCache.bytes_per_block(
            config.n_layers, 1, config.n_kv_heads, config.head_dim, dtype
        ),
        block_tokens=settings.cache.block_size,
        pool_bytes=pool_bytes,
        model_max_tokens=config.max_position_tokens,
        max_model_len=settings.model.max_model_len,
        max_num_seqs=settings.scheduler.max_num_seqs,
    )


def _capacity(settings: Settings, plan: MemoryPlan, device: torch.device) -> Capacity:
    budget = budget_tokens(
        settings.scheduler.max_num_batched_tokens,
        chunked_prefill=settings.scheduler.enable_chunked_prefill,
        max_model_len=plan.max_model_len,
    )
    return Capacity(
        num_blocks=plan.num_blocks,
        max_num_seqs=settings.scheduler.max_num_seqs,
        max_num_batched_tokens=budget,
        kv_bytes_per_token=plan.kv_bytes_per_token,
        device=str(device),
    )


def _card(
    settings: Settings, prepared: PreparedModel, plan: MemoryPlan, dtype: torch.dtype
) -> ModelCard:
    return ModelCard(
        names=settings.model.served_model_name or [prepared.name],
        vocab_tokens=prepared.vocab_tokens,
        max_model_len=plan.max_model_len,
        block_tokens=plan.block_tokens,
        dtype=str(dtype).removeprefix("torch."),
        eos_token_ids=prepared.eos_token_ids,
        bos_token_id=prepared.bos_token_id,
        fingerprint=prepared.fingerprint,
        created_s=prepared.created_s,
    )


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


def _weights_bytes(decoder: Decoder) -> int:
    return sum(weight.nbytes for weight in decoder.parameters())


def _no_memory(name: str, detail: str) -> StartupError:
    return StartupError(
        f"not enough memory for {name} ({detail}; {show_bytes(available_bytes())} are available): "
        "free memory, lower --kv-cache-memory or --max-num-seqs, or serve a smaller model"
    )


def _log_division(
    name: str, quantization: str, weights_bytes: int, plan: MemoryPlan, capacity: Capacity
) -> None:
    log.info(
        "memory_divided",
        model=name,
        quantization=quantization,
        weights=show_bytes(weights_bytes),
        weights_bytes=weights_bytes,
        kv_pool=show_bytes(plan.kv_pool_bytes),
        kv_bytes_per_token=plan.kv_bytes_per_token,
        kv_blocks=plan.num_blocks,
        kv_tokens=plan.kv_tokens,
        max_model_len=plan.max_model_len,
        fitting_requests=plan.fitting_requests,
        budget_tokens=capacity.max_num_batched_tokens,
    )

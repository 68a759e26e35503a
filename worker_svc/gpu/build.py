"""From settings to a runner on a GPU: weights, a rehearsal that shows what everything but the KV
pool takes, then the pool from what is left, and the graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import structlog
import torch

from pagemesh.shared.errors import StartupError
from pagemesh.shared.messages import Capacity, ModelCard
from pagemesh.shared.prepared import PreparedModel
from pagemesh.shared.settings import Settings
from pagemesh.worker_svc.batch import Batch
from pagemesh.worker_svc.books import DTYPES, model_card, new_batch
from pagemesh.worker_svc.gpu.card import require_card
from pagemesh.worker_svc.gpu.decoder import GPUDecoder
from pagemesh.worker_svc.gpu.executor import GPUExecutor
from pagemesh.worker_svc.gpu.limits import require_served
from pagemesh.worker_svc.gpu.rehearsal import rehearse
from pagemesh.worker_svc.kv_cache import KVCache
from pagemesh.worker_svc.loader import load_decoder
from pagemesh.worker_svc.memory import (
    GPU_BUDGET_TOKENS,
    NULL_BLOCKS,
    MemoryPlan,
    budget_tokens,
    longest_tokens,
    parse_bytes,
    plan_memory,
    show_bytes,
)
from pagemesh.worker_svc.models.config import DecoderConfig
from pagemesh.worker_svc.runner import Runner

log = structlog.get_logger(__name__)

Report = Callable[[str], None]


class _Model(NamedTuple):
    """What is known once the weights are on the device."""

    settings: Settings
    prepared: PreparedModel
    config: DecoderConfig
    decoder: GPUDecoder
    weights_bytes: int
    dtype: torch.dtype
    device: torch.device

    @property
    def kv_bytes_per_token(self) -> int:
        config = self.config
        return KVCache.bytes_per_block(
            config.n_layers, 1, config.n_kv_heads, config.head_dim, self.dtype
        )


def load_on_gpu(
    settings: Settings, folder: Path, prepared: PreparedModel, report: Report
) -> Runner:
    """A runner whose kernels are compiled and graphs captured. The stream it launches on becomes
    the calling thread's, so steps must be launched in this thread.

    Raises StartupError with the sentence to show.
    """
    device = require_card()
    require_served(settings, DecoderConfig.from_folder(folder))
    torch.cuda.set_stream(torch.cuda.Stream(device))
    model = _load_model(settings, folder, prepared, device)
    report("compiling the kernels and rehearsing the largest step")
    taken_bytes = _rehearse(model)
    plan = _plan(model, taken_bytes)
    report("laying out the KV cache and capturing graphs")
    runner, executor = _assemble(model, plan)
    executor.capture()
    _log_division(model, plan, runner.capacity, taken_bytes)
    return runner


def _load_model(
    settings: Settings, folder: Path, prepared: PreparedModel, device: torch.device
) -> _Model:
    dtype, config = DTYPES[settings.model.dtype], DecoderConfig.from_folder(folder)
    try:
        decoder = load_decoder(folder, prepared, dtype=dtype, device=device)
    except torch.OutOfMemoryError as error:
        free_bytes, _ = torch.cuda.mem_get_info(device)
        raise StartupError(
            f"the weights of {prepared.name} do not fit {torch.cuda.get_device_name(device)} "
            f"({show_bytes(free_bytes)} are free): free its memory or serve a smaller model"
        ) from error
    weights_bytes = sum(weight.nbytes for weight in decoder.parameters())
    longest = longest_tokens(settings.model.max_model_len, config.max_position_tokens)
    gpu_decoder = GPUDecoder(decoder, longest)
    return _Model(settings, prepared, config, gpu_decoder, weights_bytes, dtype, device)


def _rehearse(model: _Model) -> int:
    """Bytes of the device in use once everything but the KV pool is there: a full step and every
    kind of sampling have run, and every graph has been captured, over a pool of one block."""
    settings = model.settings
    plan = MemoryPlan(
        kv_bytes_per_token=model.kv_bytes_per_token,
        block_tokens=settings.cache.block_size,
        num_blocks=NULL_BLOCKS + 1,
        max_model_len=longest_tokens(
            settings.model.max_model_len, model.config.max_position_tokens
        ),
    )
    runner, executor = _assemble(model, plan)
    rehearse(runner)
    executor.capture()
    torch.cuda.synchronize(model.device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(model.device)
    # The graphs hold on to addresses of this pool: the real one needs graphs of its own.
    del runner, executor
    gc.collect()
    torch.cuda.empty_cache()
    return total_bytes - free_bytes


def _plan(model: _Model, taken_bytes: int) -> MemoryPlan:
    settings = model.settings
    _, total_bytes = torch.cuda.mem_get_info(model.device)
    share = settings.cache.gpu_memory_utilization
    room_bytes = int(share * total_bytes) - taken_bytes
    wanted = settings.cache.kv_cache_memory
    pool_bytes = room_bytes if wanted is None else parse_bytes(wanted)
    if pool_bytes > total_bytes - taken_bytes or room_bytes <= 0:
        raise StartupError(
            f"no room for the KV cache of {model.prepared.name}: {show_bytes(taken_bytes)} of "
            f"{show_bytes(total_bytes)} are taken by weights, working memory and other processes, "
            f"at --gpu-memory-utilization {share}: raise it, lower --max-num-batched-tokens or "
            "--kv-cache-memory, or free the device's memory"
        )
    return plan_memory(
        kv_bytes_per_token=model.kv_bytes_per_token,
        block_tokens=settings.cache.block_size,
        pool_bytes=pool_bytes,
        model_max_tokens=model.config.max_position_tokens,
        max_model_len=settings.model.max_model_len,
        max_num_seqs=settings.scheduler.max_num_seqs,
    )


def _assemble(model: _Model, plan: MemoryPlan) -> tuple[Runner, GPUExecutor]:
    settings, config = model.settings, model.config
    card = model_card(settings, model.prepared, plan, model.dtype)
    capacity = _capacity(settings, plan, model.device)
    batch = new_batch(card, capacity)
    kv = KVCache(
        config.n_layers,
        plan.num_blocks,
        plan.block_tokens,
        config.n_kv_heads,
        config.head_dim,
        model.dtype,
        model.device,
    )
    executor = _executor(model, kv, batch, card, capacity)
    return Runner(executor, batch, card, capacity), executor


def _executor(
    model: _Model, kv: KVCache, batch: Batch, card: ModelCard, capacity: Capacity
) -> GPUExecutor:
    return GPUExecutor(
        model.decoder,
        kv,
        batch,
        vocab_tokens=card.vocab_tokens,
        eos_token_ids=card.eos_token_ids,
        max_step_tokens=capacity.max_num_batched_tokens,
        eager=model.settings.parallel.enforce_eager,
    )


def _capacity(settings: Settings, plan: MemoryPlan, device: torch.device) -> Capacity:
    scheduler = settings.scheduler
    return Capacity(
        num_blocks=plan.num_blocks,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=budget_tokens(
            scheduler.max_num_batched_tokens,
            default_tokens=GPU_BUDGET_TOKENS,
            chunked_prefill=scheduler.enable_chunked_prefill,
            max_model_len=plan.max_model_len,
        ),
        kv_bytes_per_token=plan.kv_bytes_per_token,
        device=str(device),
    )


def _log_division(model: _Model, plan: MemoryPlan, capacity: Capacity, taken_bytes: int) -> None:
    log.info(
        "memory_divided",
        model=model.prepared.name,
        device=torch.cuda.get_device_name(model.device),
        weights=show_bytes(model.weights_bytes),
        weights_bytes=model.weights_bytes,
        all_but_kv_pool=show_bytes(taken_bytes),
        kv_pool=show_bytes(plan.kv_pool_bytes),
        kv_bytes_per_token=plan.kv_bytes_per_token,
        kv_blocks=plan.num_blocks,
        kv_tokens=plan.kv_tokens,
        max_model_len=plan.max_model_len,
        fitting_requests=plan.fitting_requests,
        budget_tokens=capacity.max_num_batched_tokens,
    )

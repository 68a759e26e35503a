"""From settings to a runner on a GPU: weights, kernels, a rehearsal that shows what everything but
the KV pool takes, then the pool from what is left, and the graphs."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import structlog
import torch

from pagemesh.kernels.gpu.compile_ahead import compile_ahead, noted_launches
from pagemesh.kernels.kept_code import alone_in
from pagemesh.shared.errors import StartupError
from pagemesh.shared.messages import Capacity
from pagemesh.shared.prepared import PreparedModel
from pagemesh.shared.settings import Settings
from pagemesh.worker_svc.books import (
    DTYPES,
    bytes_of_weights,
    model_card,
    new_batch,
    new_grammars,
)
from pagemesh.worker_svc.cores import usable_cores
from pagemesh.worker_svc.gpu.card import look_at, read_memory, require_card
from pagemesh.worker_svc.gpu.decoder import GPUDecoder
from pagemesh.worker_svc.gpu.executor import GPUExecutor
from pagemesh.worker_svc.gpu.limits import require_served
from pagemesh.worker_svc.gpu.memory import (
    Card,
    Division,
    Limit,
    Needs,
    StepTooLarge,
    Wanted,
    division_figures,
    division_table,
    lowered,
    lowered_to_fit,
)
from pagemesh.worker_svc.gpu.memory_advice import check_weights, divide, ran_out, step_too_large
from pagemesh.worker_svc.gpu.rehearsal import dry_run, rehearse
from pagemesh.worker_svc.kv_cache import KVCache
from pagemesh.worker_svc.loader import fill_decoder
from pagemesh.worker_svc.memory import (
    GPU_BUDGET_TOKENS,
    GPU_NUM_SEQS,
    NULL_BLOCKS,
    MemoryPlan,
    budget_tokens,
    is_out_of_memory,
    longest_tokens,
    parse_bytes,
)
from pagemesh.worker_svc.models.config import DecoderConfig
from pagemesh.worker_svc.models.decoder import Decoder
from pagemesh.worker_svc.runner import Runner
from pagemesh.worker_svc.stages import Stages

_NARROW: Final = torch.bfloat16
log = structlog.get_logger(__name__)


def load_on_gpu(
    settings: Settings,
    folder: Path,
    prepared: PreparedModel,
    stages: Stages,
    code_folder: Path | None,
) -> Runner:
    """A runner whose kernels are compiled and graphs captured. The stream it launches on becomes
    the calling thread's, so steps must be launched in this thread. Processes that share a
    `code_folder` compile one after the other.

    Raises StartupError with the sentence to show.
    """
    stages.enter("device", "starting the GPU")
    device = require_card()
    torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    config = DecoderConfig.from_folder(folder)
    require_served(settings, config)
    wanted = wanted_of(settings, config)
    build = _Build(settings, folder, prepared, config, device, look_at(device), wanted)
    try:
        return build.run(stages, code_folder)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise StartupError(ran_out(prepared.name, build.card)) from error
        raise


def wanted_of(settings: Settings, config: DecoderConfig) -> Wanted:
    """What is asked of the device's memory. Raises SettingsError for what cannot work."""
    cache, scheduler = settings.cache, settings.scheduler
    max_model_len = settings.model.max_model_len
    longest = longest_tokens(max_model_len, config.max_position_tokens)
    step_tokens = budget_tokens(
        scheduler.max_num_batched_tokens,
        default_tokens=GPU_BUDGET_TOKENS,
        chunked_prefill=scheduler.enable_chunked_prefill,
        max_model_len=longest,
    )
    return Wanted(
        share=cache.gpu_memory_utilization,
        kv_bytes=None if cache.kv_cache_memory is None else parse_bytes(cache.kv_cache_memory),
        kv_bytes_per_token=KVCache.bytes_per_token(config, DTYPES[settings.model.dtype]),
        block_tokens=cache.block_size,
        model_max_tokens=config.max_position_tokens,
        max_model_len=max_model_len,
        max_num_seqs=scheduler.max_num_seqs or GPU_NUM_SEQS,
        step_tokens=step_tokens,
        fewest_step_tokens=1 if scheduler.enable_chunked_prefill else longest,
    )


@dataclass(frozen=True, slots=True)
class _Build:
    settings: Settings
    folder: Path
    prepared: PreparedModel
    config: DecoderConfig
    device: torch.device
    card: Card
    wanted: Wanted

    def run(self, stages: Stages, code_folder: Path | None) -> Runner:
        name = self.prepared.name
        stages.enter("weights", f"loading the weights of {name}")
        before = read_memory(self.device)
        model = self._load(stages)
        loaded = read_memory(self.device)
        # Others may have given some back meanwhile.
        weights_bytes = max(before.free_bytes - loaded.free_bytes, loaded.allocated_bytes)
        stages.enter("kernels", "compiling the kernels, which the first start on a machine does")
        with alone_in(code_folder):
            self._compile(model)
        stages.enter("rehearsal", "rehearsing the largest step")
        needs = self._rehearse(model, weights_bytes)
        division = divide(name, self.card, needs, self.wanted)
        stages.enter("kv_pool", "laying out the KV cache")
        runner, executor = self._assemble(model, division.plan, self.wanted, eager=self._eager)
        stages.enter("graphs", "capturing graphs of decode steps")
        executor.capture()
        self._log(division)
        return runner

    @property
    def _dtype(self) -> torch.dtype:
        return DTYPES[self.settings.model.dtype]

    @property
    def _eager(self) -> bool:
        return self.settings.parallel.enforce_eager

    def _load(self, stages: Stages) -> GPUDecoder:
        sizes = (bytes_of_weights(self.config, dtype) for dtype in (self._dtype, _NARROW))
        check_weights(self.prepared.name, self.card, *sizes)
        decoder = Decoder(self.config, dtype=self._dtype, device=self.device)
        fill_decoder(decoder, self.folder, self.prepared, stages.doing)
        longest = longest_tokens(self.wanted.max_model_len, self.wanted.model_max_tokens)
        return GPUDecoder(decoder.eval(), longest)

    def _compile(self, model: GPUDecoder) -> None:
        """All kernels beside each other; none of those that the last start left on disk."""
        with noted_launches() as notes:
            try:
                dry_run(*self._assemble_for_rehearsal(model.excerpt(), self.wanted, eager=True))
            except RuntimeError as error:
                if not is_out_of_memory(error):  # of which the rehearsal has more to say
                    raise
        _give_back()
        compile_ahead(notes, usable_cores())

    def _rehearse(self, model: GPUDecoder, weights_bytes: int) -> Needs:
        """Raises StartupError when it does not fit, with what was found to by trying."""
        outcome = self._try(model, weights_bytes, self.wanted)
        if isinstance(outcome, Needs):
            return outcome
        fits = self._what_fits(model, weights_bytes, lowered(self.wanted, outcome))
        raise step_too_large(self.prepared.name, self.card, self.wanted, fits)

    def _what_fits(
        self, model: GPUDecoder, weights_bytes: int, trial: Wanted | None
    ) -> Wanted | None:
        while trial is not None:
            outcome = self._try(model, weights_bytes, trial)
            if isinstance(outcome, Needs):
                return lowered_to_fit(self.card, outcome, trial)
            trial = lowered(trial, outcome)
        return None

    def _try(self, model: GPUDecoder, weights_bytes: int, wanted: Wanted) -> Needs | Limit:
        """What is needed, or which limit makes too much of it."""
        assemble = partial(self._assemble_for_rehearsal, model, wanted, eager=self._eager)
        try:
            return rehearse(assemble, partial(read_memory, self.device), weights_bytes)
        except StepTooLarge as error:
            return error.limit
        finally:
            _give_back()

    def _assemble_for_rehearsal(
        self, model: GPUDecoder, wanted: Wanted, *, eager: bool
    ) -> tuple[Runner, GPUExecutor]:
        """Over a pool of one block. Graphs hold on to addresses of a pool, so that the one to serve
        from needs graphs of its own."""
        plan = MemoryPlan(
            kv_bytes_per_token=wanted.kv_bytes_per_token,
            block_tokens=wanted.block_tokens,
            num_blocks=NULL_BLOCKS + 1,
            max_model_len=longest_tokens(wanted.max_model_len, wanted.model_max_tokens),
        )
        return self._assemble(model, plan, wanted, eager=eager)

    def _assemble(
        self, model: GPUDecoder, plan: MemoryPlan, wanted: Wanted, *, eager: bool
    ) -> tuple[Runner, GPUExecutor]:
        card = model_card(self.settings, self.prepared, self.config, plan, self._dtype)
        capacity = Capacity(
            num_blocks=plan.num_blocks,
            max_num_seqs=wanted.max_num_seqs,
            max_num_batched_tokens=wanted.step_tokens,
            kv_bytes_per_token=plan.kv_bytes_per_token,
            device=str(self.device),
        )
        batch = new_batch(card, capacity)
        executor = GPUExecutor(
            model,
            self._pool(plan),
            batch,
            vocab_tokens=card.vocab_tokens,
            eos_token_ids=card.eos_token_ids,
            max_step_tokens=wanted.step_tokens,
            eager=eager,
            grammars=new_grammars(self.folder, card),
        )
        return Runner(executor, batch, card, capacity), executor

    def _pool(self, plan: MemoryPlan) -> KVCache:
        config = self.config
        return KVCache(config, plan.num_blocks, plan.block_tokens, self._dtype, self.device)

    def _log(self, division: Division) -> None:
        log.info(
            "memory_divided",
            model=self.prepared.name,
            **division_figures(division, self.wanted),
            table=division_table(division, self.wanted),
        )


def _give_back() -> None:
    """To the device, what nobody refers to any more."""
    gc.collect()
    torch.cuda.empty_cache()

"""The real worker service around a device that reads its answers from a script.

python -m parts.chaos_worker worker     (settings in PAGEMESH_*, seconds of a step in CHAOS_STEP_S)
"""

from __future__ import annotations

import os
import time
from typing import Final

import numpy as np
import torch
import uvloop

from pagemesh.shared.engine_messages import NewRow
from pagemesh.shared.logs import configure_logging
from pagemesh.shared.messages import Capacity
from pagemesh.shared.prepared import load_prepared, prepared_folder
from pagemesh.shared.service import serve
from pagemesh.shared.settings import Settings
from pagemesh.shared.settings_sources import load_settings
from pagemesh.worker_svc.batch import Batch, Ints, Rows, WireInts
from pagemesh.worker_svc.books import model_card, new_batch
from pagemesh.worker_svc.executor import Computed, at_once
from pagemesh.worker_svc.memory import CPU_NUM_SEQS, plan_memory
from pagemesh.worker_svc.models.config import DecoderConfig
from pagemesh.worker_svc.runner import Runner
from pagemesh.worker_svc.sampler import NO_LOGPROBS, SampledRows
from pagemesh.worker_svc.service import WorkerService
from pagemesh.worker_svc.stages import Report
from parts.prompt_script import PromptScript

STEP_S: Final = "CHAOS_STEP_S"
_KV_BYTES_PER_TOKEN: Final = 1024
_BUDGET_TOKENS: Final = 8192


class ScriptedExecutor:
    """A worker_svc.executor.Executor. A step takes `step_s`, whatever its rows.

    A request that comes with tokens which are not those of its prompt is refused, and the step with
    it: whoever moved it here has lost or doubled a token.
    """

    def __init__(self, script: PromptScript, batch: Batch, step_s: float) -> None:
        self._script = script
        self._batch = batch
        self._step_s = step_s
        self._starts = np.zeros(batch.max_num_seqs, np.int64)

    def leave(self, slots: Ints) -> None: ...

    def enter(self, row: NewRow, ids: WireInts) -> None:
        start = self._script.start(ids[: row.n_prompt])
        prior = ids[row.n_prompt :]
        if not np.array_equal(prior, self._script.tokens(start, len(prior))):
            raise ValueError(f"{row.request_id} comes with {len(prior)} tokens, not of its answer")
        self._starts[row.slot] = start

    def grow(self, slots: Ints, columns: Ints, blocks: Ints) -> None: ...

    def copy_blocks(self, src: Ints, dst: Ints) -> None: ...

    def clear(self) -> None: ...

    def relieve(self) -> None: ...

    def compute(self, rows: Rows) -> Computed:
        time.sleep(self._step_s)
        slots = rows.slots[rows.samples]
        places = self._starts[slots] + self._batch.known[slots] - self._batch.n_prompt[slots]
        tokens = torch.from_numpy(self._script.ids[places % len(self._script.ids)].astype(np.int64))
        sampled = SampledRows(tokens, np.ones(len(slots), np.bool_), NO_LOGPROBS, None)
        return Computed(sampled, [], [], tokens, at_once)

    def commit(self, rows: Rows, tokens: torch.Tensor | None) -> None: ...


def build_scripted(settings: Settings, report: Report) -> Runner:
    """A worker_svc.service.BuildRunner."""
    folder = prepared_folder(settings.model)
    prepared = load_prepared(folder)
    max_num_seqs = settings.scheduler.max_num_seqs or CPU_NUM_SEQS
    plan = plan_memory(
        kv_bytes_per_token=_KV_BYTES_PER_TOKEN,
        block_tokens=settings.cache.block_size,
        pool_bytes=2**40,
        model_max_tokens=prepared.max_position_tokens,
        max_model_len=settings.model.max_model_len,
        max_num_seqs=max_num_seqs,
    )
    card = model_card(settings, prepared, DecoderConfig.from_folder(folder), plan, torch.float32)
    capacity = Capacity(
        plan.num_blocks, max_num_seqs, _BUDGET_TOKENS, _KV_BYTES_PER_TOKEN, "scripted"
    )
    batch = new_batch(card, capacity)
    script = PromptScript(folder / "tokenizer.json")
    executor = ScriptedExecutor(script, batch, float(os.environ[STEP_S]))
    return Runner(executor, batch, card, capacity)


def main() -> None:
    settings = load_settings({}, None, os.environ).settings
    configure_logging("worker", settings.log)
    host, port = settings.mesh.service_host, settings.mesh.service_port
    uvloop.run(
        serve(
            "worker",
            settings,
            lambda runtime: WorkerService(runtime, build_scripted),
            host=host,
            port=port,
        )
    )


if __name__ == "__main__":
    main()

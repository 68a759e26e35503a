"""A worker process without a model: scripted tokens, steps of a set length.

python -m parts.scripted_worker        (settings in PAGEMESH_*, the script in MESH_BENCH_*)
"""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from pagemesh.shared.engine_messages import Step, StepResult
from pagemesh.shared.link import Link
from pagemesh.shared.messages import Capacity, ModelCard
from pagemesh.shared.prepared import PreparedModel, load_prepared, prepared_folder
from pagemesh.shared.settings import Settings
from pagemesh.shared.step_stats import StepPace
from pagemesh.worker_svc.memory import CPU_NUM_SEQS
from parts.probe import Probe, installed_probe
from parts.script import ScriptedRows, script_of
from parts.worker import run_worker, send_result

STEP_S: Final = "MESH_BENCH_STEP_S"
TOKEN_S: Final = "MESH_BENCH_TOKEN_S"
BLOCKS: Final = "MESH_BENCH_BLOCKS"
TEXT: Final = "MESH_BENCH_TEXT"
BLOCKS_PER_ROW: Final = 512


class ScriptedDevice:
    """A worker.Device. A step takes as long as `pace` says, one after the other, in a thread as the
    real worker's; with 0 they are answered on the event loop at once."""

    def __init__(
        self, settings: Settings, pace: StepPace, text: Path, probe: Probe, blocks: int | None
    ) -> None:
        folder = prepared_folder(settings.model)
        rows = settings.scheduler.max_num_seqs or CPU_NUM_SEQS
        tokens = settings.scheduler.max_num_batched_tokens or 8192
        self.card = _card(settings, load_prepared(folder))
        self.capacity = Capacity(1 + (blocks or rows * BLOCKS_PER_ROW), rows, tokens, 1024, "cpu")
        self._pace = pace
        self._probe = probe
        self._rows = ScriptedRows(script_of(text.read_text(), folder / "tokenizer.json"), rows)
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="scripted-compute")

    def take(self, link: Link, step: Step) -> None:
        if not any(self._pace):
            send_result(link, self._execute(step))
            return
        loop = asyncio.get_running_loop()
        computing = loop.run_in_executor(self._compute, self._execute_slowly, step)
        computing.add_done_callback(lambda done: send_result(link, done.result()))

    async def run(self) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self._compute.shutdown()

    def _execute(self, step: Step) -> StepResult:
        return StepResult(step.epoch, step.step, self._rows.execute(step))

    def _execute_slowly(self, step: Step) -> StepResult:
        elapsed_s = self._pace.overhead_s + self._pace.token_s * step.n_tokens
        end_s = time.perf_counter() + elapsed_s
        self._probe.note("step begins")
        result = self._execute(step)
        time.sleep(max(0.0, end_s - time.perf_counter()))
        self._probe.note("step ends")
        return result._replace(elapsed_s=elapsed_s)


def _card(settings: Settings, prepared: PreparedModel) -> ModelCard:
    return ModelCard(
        names=[prepared.name],
        vocab_tokens=prepared.vocab_tokens,
        max_model_len=prepared.max_position_tokens,
        block_tokens=settings.cache.block_size,
        dtype="scripted",
        eos_token_ids=prepared.eos_token_ids,
        bos_token_id=prepared.bos_token_id,
        fingerprint=prepared.fingerprint,
        created_s=prepared.created_s,
    )


def main() -> None:
    pace = StepPace(float(os.environ[STEP_S]), float(os.environ.get(TOKEN_S, 0)))
    text, blocks = Path(os.environ[TEXT]), int(os.environ.get(BLOCKS, 0)) or None
    with installed_probe("worker") as probe:
        run_worker(lambda settings: ScriptedDevice(settings, pace, text, probe, blocks))


if __name__ == "__main__":
    main()

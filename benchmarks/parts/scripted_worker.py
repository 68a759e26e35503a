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
from pagemesh.worker_svc.memory import CPU_NUM_SEQS
from parts.probe import Probe, installed_probe
from parts.script import ScriptedRows, script_of
from parts.worker import run_worker, send_result

STEP_S: Final = "MESH_BENCH_STEP_S"
TEXT: Final = "MESH_BENCH_TEXT"
BLOCKS_PER_ROW: Final = 512


class ScriptedDevice:
    """A worker.Device. Steps take `step_s` each, one after the other, in a thread as the real
    worker's; with 0 they are answered on the event loop at once."""

    def __init__(self, settings: Settings, step_s: float, text: Path, probe: Probe) -> None:
        folder = prepared_folder(settings.model)
        rows = settings.scheduler.max_num_seqs or CPU_NUM_SEQS
        self.card = _card(settings, load_prepared(folder))
        self.capacity = Capacity(1 + rows * BLOCKS_PER_ROW, rows, 8192, 1024, "cpu")
        self._step_s = step_s
        self._probe = probe
        self._rows = ScriptedRows(script_of(text.read_text(), folder / "tokenizer.json"), rows)
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="scripted-compute")

    def take(self, link: Link, step: Step) -> None:
        if self._step_s == 0:
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
        end_s = time.perf_counter() + self._step_s
        self._probe.note("step begins")
        result = self._execute(step)
        time.sleep(max(0.0, end_s - time.perf_counter()))
        self._probe.note("step ends")
        return result


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
    step_s, text = float(os.environ[STEP_S]), Path(os.environ[TEXT])
    with installed_probe("worker") as probe:
        run_worker(lambda settings: ScriptedDevice(settings, step_s, text, probe))


if __name__ == "__main__":
    main()

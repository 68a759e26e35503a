"""A worker process without a model: the real link protocol, scripted tokens, steps of a set length.

python -m mesh_parts.scripted_worker        (settings in PAGEMESH_*, the script in MESH_BENCH_*)
"""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

import uvloop
from aiohttp import web

from mesh_parts.probe import Probe, installed_probe
from mesh_parts.script import ScriptedRows, script_of
from pagemesh.shared.engine_messages import Step, StepResult
from pagemesh.shared.errors import LinkClosed
from pagemesh.shared.link import LINK_PATH, Link, accept
from pagemesh.shared.logs import configure_logging
from pagemesh.shared.messages import Capacity, Engines, EngineStats, EngineStatus, ModelCard
from pagemesh.shared.prepared import PreparedModel, load_prepared, prepared_folder
from pagemesh.shared.service import Runtime, serve
from pagemesh.shared.settings import Settings
from pagemesh.shared.settings_sources import load_settings

STEP_S: Final = "MESH_BENCH_STEP_S"
TEXT: Final = "MESH_BENCH_TEXT"
BLOCKS_PER_ROW: Final = 512


class ScriptedWorker:
    """A shared.service.ServiceCore. Steps take `step_s` each, one after the other, in a thread as
    the real worker's; with 0 they are answered on the event loop at once."""

    def __init__(self, runtime: Runtime, step_s: float, text: Path, probe: Probe) -> None:
        settings = runtime.settings
        folder = prepared_folder(settings.model)
        max_num_seqs = settings.scheduler.max_num_seqs
        self._runtime = runtime
        self._step_s = step_s
        self._probe = probe
        self._rows = ScriptedRows(
            script_of(text.read_text(), folder / "tokenizer.json"), max_num_seqs
        )
        self._status = _status(runtime.instance_id, settings, load_prepared(folder))
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="scripted-compute")

    def routes(self) -> list[web.RouteDef]:
        return [web.get(LINK_PATH, self._serve_scheduler)]

    def not_ready(self) -> str | None:
        return None

    async def run(self) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self._compute.shutdown()

    async def drain(self) -> None:
        """Whoever measures stops asking first."""

    async def _serve_scheduler(self, request: web.Request) -> web.WebSocketResponse:
        link, socket = await accept(request, self._runtime.hello())
        if link is None:
            return socket
        link.send(Engines([self._status]))
        async for message in link:
            if isinstance(message, Step):
                self._take(link, message)
        await link.close()
        return socket

    def _take(self, link: Link, step: Step) -> None:
        if self._step_s == 0:
            _send(link, self._execute(step))
            return
        loop = asyncio.get_running_loop()
        computing = loop.run_in_executor(self._compute, self._execute_slowly, step)
        computing.add_done_callback(lambda done: _send(link, done.result()))

    def _execute(self, step: Step) -> StepResult:
        return StepResult(step.epoch, step.step, self._rows.execute(step))

    def _execute_slowly(self, step: Step) -> StepResult:
        end_s = time.perf_counter() + self._step_s
        self._probe.note("step begins")
        result = self._execute(step)
        time.sleep(max(0.0, end_s - time.perf_counter()))
        self._probe.note("step ends")
        return result


def _send(link: Link, result: StepResult) -> None:
    with suppress(LinkClosed):
        link.send(result)


def _status(instance_id: str, settings: Settings, prepared: PreparedModel) -> EngineStatus:
    max_num_seqs = settings.scheduler.max_num_seqs
    card = ModelCard(
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
    num_blocks = 1 + max_num_seqs * BLOCKS_PER_ROW
    capacity = Capacity(num_blocks, max_num_seqs, 8192, 1024, "cpu")
    return EngineStatus(instance_id, card, capacity, EngineStats())


def main() -> None:
    settings = load_settings({}, None, os.environ).settings
    configure_logging("worker", settings.log)
    step_s, text = float(os.environ[STEP_S]), Path(os.environ[TEXT])
    with installed_probe("worker") as probe:
        running = serve(
            "worker",
            settings,
            lambda runtime: ScriptedWorker(runtime, step_s, text, probe),
            host=settings.mesh.service_host,
            port=0,
        )
        uvloop.run(running)


if __name__ == "__main__":
    main()

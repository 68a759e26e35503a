"""The real worker service around a traced runner: python -m parts.traced_worker worker.

Settings come as for any service (PAGEMESH_*), a Plan in STEP_TRACE_PLAN. Tasks come over HTTP, on
the worker's own port: Triton's compiler takes over the signals that are free for such use (LLVM
answers SIGUSR1 itself from the first kernel on that is compiled in the process).
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Final

import msgspec
import uvloop
from aiohttp import web

from pagemesh.shared.engine_messages import Step
from pagemesh.shared.link import Link
from pagemesh.shared.logs import configure_logging
from pagemesh.shared.service import Runtime, serve
from pagemesh.shared.settings import Settings
from pagemesh.shared.settings_sources import load_settings
from pagemesh.shared.wire import Message
from pagemesh.worker_svc.build import Report, build_runner
from pagemesh.worker_svc.service import WorkerService
from parts.step_notes import Failed, Outcome, Task
from parts.traced_runner import TracedRunner

PLAN: Final = "STEP_TRACE_PLAN"
WATCH_PATH: Final = "/watch"
STANDING_PATH: Final = "/standing"


class Plan(msgspec.Struct):
    """The worker listens on `port`. `folder` takes traces; `keep`: those that could be read stay
    there too."""

    port: int
    folder: str
    keep: bool


class Order(msgspec.Struct):
    """To work on a task, once the mean context is `from_tokens` long, for `patience_s` at most. The
    answer is the task's outcome."""

    task: Task
    from_tokens: int
    patience_s: float


class Standing(msgspec.Struct):
    """`n_rows` of all steps until now."""

    max_model_len: int
    vocab_tokens: int
    n_rows: int


class TracedWorker(WorkerService):
    """Builds the runner in the launching thread, which also reports outcomes; all else is the event
    loop's."""

    def __init__(self, runtime: Runtime, plan: Plan) -> None:
        super().__init__(runtime, self._build_traced)
        self._plan = plan
        self._loop = asyncio.get_running_loop()
        self._traced: TracedRunner | None = None
        self._awaited: dict[Task, asyncio.Future[Outcome]] = {}

    def routes(self) -> list[web.RouteDef]:
        own = [web.post(WATCH_PATH, self._on_watch), web.get(STANDING_PATH, self._on_standing)]
        return [*super().routes(), *own]

    def _build_traced(self, settings: Settings, report: Report) -> TracedRunner:
        runner = build_runner(settings, report)
        folder = Path(self._plan.folder)
        self._traced = TracedRunner(runner, self._report_outcome, folder, keep=self._plan.keep)
        return self._traced

    def _report_outcome(self, task: Task, outcome: Outcome) -> None:
        self._loop.call_soon_threadsafe(self._answer, task, outcome)

    def _answer(self, task: Task, outcome: Outcome) -> None:
        """Whoever asked may have lost patience."""
        if (awaited := self._awaited.get(task)) is not None and not awaited.done():
            awaited.set_result(outcome)

    def _on_message(self, link: Link, message: Message) -> None:
        if isinstance(message, Step) and self._traced is not None:
            self._traced.arrive(message.step)
        super()._on_message(link, message)

    async def _on_watch(self, request: web.Request) -> web.Response:
        order = msgspec.json.decode(await request.read(), type=Order)
        if self._traced is None:
            raise web.HTTPServiceUnavailable
        awaited = self._awaited[order.task] = self._loop.create_future()
        self._traced.begin(order.task, order.from_tokens)
        try:
            outcome = await asyncio.wait_for(awaited, order.patience_s)
        except TimeoutError:
            reason = f"no outcome in {order.patience_s:.0f} s: {self._traced.so_far()}"
            outcome = Failed(reason, "no trace")
        return _json(outcome)

    async def _on_standing(self, _: web.Request) -> web.Response:
        if self._traced is None:
            raise web.HTTPServiceUnavailable
        card = self._traced.card
        return _json(Standing(card.max_model_len, card.vocab_tokens, self._traced.n_rows))


def _json(content: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), content_type="application/json")


def main() -> None:
    settings = load_settings({}, None, os.environ).settings
    configure_logging("worker", settings.log)
    plan = msgspec.json.decode(os.environ[PLAN], type=Plan)
    uvloop.run(
        serve(
            "worker",
            settings,
            lambda runtime: TracedWorker(runtime, plan),
            host=settings.mesh.service_host,
            port=plan.port,
        )
    )


if __name__ == "__main__":
    main()

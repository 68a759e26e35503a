"""The worker service: the link of its scheduler in front, the runner in threads behind."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

import structlog
from aiohttp import web

from pagemesh.shared.engine_messages import CachedBlocks, NeedSnapshot, Step, StepResult
from pagemesh.shared.errors import LinkClosed, Stalled
from pagemesh.shared.leases import Lease
from pagemesh.shared.ledger import Ledger, LedgerCollector
from pagemesh.shared.link import LINK_PATH, Link, accept
from pagemesh.shared.messages import Engines, EngineStats, EngineStatus
from pagemesh.shared.prepared import served_names
from pagemesh.shared.progress import LOOK_S
from pagemesh.shared.registry import AWAY, Load
from pagemesh.shared.service import Runtime
from pagemesh.shared.settings import Settings
from pagemesh.shared.watchdog import dump_stacks
from pagemesh.shared.wire import Message
from pagemesh.worker_svc.build import build_runner
from pagemesh.worker_svc.command import Command
from pagemesh.worker_svc.compute_thread import ComputeThread, Started
from pagemesh.worker_svc.device_lost import DeviceLost, loses_device
from pagemesh.worker_svc.landing import Landing
from pagemesh.worker_svc.metrics import WorkerMetrics
from pagemesh.worker_svc.progress import ComputeProgress
from pagemesh.worker_svc.runner import Runner, StepGap
from pagemesh.worker_svc.stages import Report

# A scheduler runs a few steps ahead; one that sends far more has lost count.
MAX_QUEUED_STEPS: Final = 64

BuildRunner = Callable[[Settings, Report], Runner]
BUILD: Final[BuildRunner] = partial(build_runner, own_process=True)
log = structlog.get_logger(__name__)


class WorkerService:
    """A shared.service.ServiceCore. The event loop owns links and metrics; one thread launches
    steps, another takes their results where they come later. All keep the order of the steps."""

    def __init__(self, runtime: Runtime, build: BuildRunner = BUILD) -> None:
        self._runtime = runtime
        self._build = build
        self._progress = ComputeProgress(runtime.settings.mesh.step_timeout_s)
        self._metrics = WorkerMetrics(runtime.metrics)
        self._metrics.watch(self._progress)
        runtime.metrics.register(LedgerCollector(self._ledger))
        self._command = Command()
        self._holder: Link | None = None
        self._offered_to: Link | None = None
        self._freeing: set[asyncio.Task[None]] = set()
        self._runner: Runner | None = None
        self._compute: ComputeThread | None = None
        self._stage = "starting"
        self._queued: Counter[Link] = Counter()
        self._snapshot_asked = False
        self._draining = False
        self._settled = asyncio.Event()
        self._device_lost: DeviceLost | None = None
        self._lost = asyncio.Event()
        # Of the launching thread.
        self._served: Link | None = None

    @property
    def models(self) -> list[str]:
        """As the registry shows them. Raises StartupError for a folder that cannot be read."""
        return served_names(self._runtime.settings.model)

    def routes(self) -> list[web.RouteDef]:
        return [web.get(LINK_PATH, self._on_dial)]

    def not_ready(self) -> str | None:
        """Ready is who has computed a step lately, or is idle and would compute one."""
        return self._stage if self._runner is None else self._progress.slow()

    def load(self) -> Load:
        rows = None if self._runner is None else self._runner.capacity.max_num_seqs
        return Load(self._ledger().in_flight, rows)

    async def run(self) -> None:
        """Load the model, listening already, then watch. Raises StartupError when it cannot, and
        DeviceLost or Stalled when the process can compute no more."""
        self._compute = ComputeThread("worker-compute", "worker-landing")
        try:
            load = partial(self._build, self._runtime.settings, self._report)
            self._runner = await self._compute.submit(load)
            self._metrics.describe_pool(self._runner.card, self._runner.capacity)
            # As the shell did at the start: loading made most of what is here to stay.
            gc.collect()
            gc.freeze()
            log.info("model_ready", model=self._runner.card.names[0])
            self._introduce()
            await self._watch(self._compute)
        finally:
            self._compute.stop()

    async def drain(self) -> None:
        """Return when no request is left. The scheduler is told to send no new ones; those that it
        has here when the time is up are lost to it, and go on elsewhere."""
        self._draining = True
        self._offer()
        try:
            while not self._idle:
                self._settled.clear()
                await self._settled.wait()
        finally:
            if self._holder is not None:
                await self._holder.close("shutting down")

    # -- links ------------------------------------------------------------------------------------

    async def _on_dial(self, request: web.Request) -> web.StreamResponse:
        hello, refusal = self._runtime.hello(), self._command.refusal
        link, response = await accept(request, hello, refusal)
        if link is None:
            return response
        if not self._command.join(link):
            await link.close("another scheduler was first")
            return response
        self._obey(link)
        try:
            async for message in link:
                self._on_message(link, message)
        finally:
            if self._command.leave(link):
                self._obey(None)
                self._free(link)
            await link.close()
        return response

    def _obey(self, link: Link | None) -> None:
        """No other's steps are executed from now on, and its own once it was offered the engine."""
        self._holder = link
        if link is not None:
            log.info("commanded_by", scheduler=link.name, lease_term=link.peer.lease_term)
        self._snapshot_asked = False
        self._settled.set()
        self._introduce()

    def _introduce(self) -> None:
        """Begin anew with the holder: tell it what the pages hold, then offer the engine."""
        link, runner = self._holder, self._runner
        if link is not None and runner is not None and self._compute is not None:
            taking_stock = self._compute.submit(partial(self._change_hands, runner, link))
            taking_stock.add_done_callback(partial(self._tell, link))

    def _change_hands(self, runner: Runner, link: Link) -> Started | None:
        """In the launching thread. What the last scheduler has in flight lands first: it may yet
        prove bad."""
        if link is not self._holder:
            return None
        runner.reset()
        self._served = link
        told = partial(runner.pages.told, self._runtime.epoch, runner.card)
        return Started(told, ready=False)

    def _tell(self, link: Link, done: asyncio.Future[list[CachedBlocks] | None]) -> None:
        error = done.exception()
        if error is not None:
            self._give_up(link, 0, error)
        elif link is self._holder:
            for held in done.result() or ():
                _send(link, held)
            self._offered_to = link
            self._offer()

    def _free(self, link: Link) -> None:
        """Its lease need not lapse before another scheduler may take it."""
        freeing = asyncio.create_task(self._release(Lease(link.peer.lease_term, link.name)))
        self._freeing.add(freeing)
        freeing.add_done_callback(self._freeing.discard)

    async def _release(self, lease: Lease) -> None:
        with suppress(*AWAY):
            await self._runtime.registry.leases.release(self._runtime.instance_id, lease)

    def _offer(self) -> None:
        if self._holder is None or self._runner is None or self._holder is not self._offered_to:
            return
        runner = self._runner
        status = EngineStatus(
            self._runtime.instance_id, runner.card, runner.capacity, EngineStats()
        )
        _send(self._holder, Engines([status], draining=self._draining))

    # -- steps ------------------------------------------------------------------------------------

    def _on_message(self, link: Link, message: Message) -> None:
        if not isinstance(message, Step):
            log.warning("unexpected_message", peer=link.name, kind=type(message).__name__)
        elif link is self._holder and self._runner is not None and self._compute is not None:
            if self._queued[link] >= MAX_QUEUED_STEPS:
                link.abort(f"more than {MAX_QUEUED_STEPS} steps wait to be computed")
                return
            self._queued[link] += 1
            job = partial(self._launch, self._runner, link, message)
            deliver = partial(self._deliver, link, message, time.monotonic())
            self._compute.submit(job).add_done_callback(deliver)

    def _launch(self, runner: Runner, link: Link, step: Step) -> Started | NeedSnapshot | None:
        """In the launching thread. None: another scheduler has taken over meanwhile."""
        if not (link is self._holder is self._served):
            return None
        self._progress.begun(step)
        try:
            landing = runner.launch(step)
        except StepGap as gap:
            self._progress.undone()
            return NeedSnapshot(gap.epoch, gap.last_step)
        except BaseException:
            self._progress.undone()
            raise
        return Started(partial(self._land, runner, landing), landing.ready)

    def _land(self, runner: Runner, landing: Landing) -> StepResult:
        """In the landing thread, or in the launching one when that has nothing to wait for."""
        result: StepResult | None = None
        try:
            result = landing.result()
        finally:
            step = self._progress.landed(None if result is None else result.elapsed_s)
            if result is None or result.failed or result.nonfinite:
                runner.pages.distrust(step)
        return result

    def _deliver(
        self,
        link: Link,
        step: Step,
        arrived_s: float,
        done: asyncio.Future[StepResult | NeedSnapshot | None],
    ) -> None:
        self._queued[link] -= 1
        if not self._queued[link]:
            del self._queued[link]
        self._settled.set()
        error = done.exception()
        if error is not None:
            self._give_up(link, step.step, error)
            return
        result = done.result()
        if isinstance(result, StepResult):
            self._snapshot_asked = False
            self._metrics.count(step, result)
            _send(link, result._replace(inside_s=time.monotonic() - arrived_s))
        elif isinstance(result, NeedSnapshot) and not self._snapshot_asked:
            # Steps already on their way do not follow either: ask once.
            self._snapshot_asked = True
            self._metrics.count_gap()
            log.warning("snapshot_needed", step=step.step, base=step.base)
            _send(link, result)

    def _give_up(self, link: Link, step: int, error: BaseException) -> None:
        """The scheduler loses this engine, and its requests go on elsewhere."""
        if not link.closed:  # what was launched behind a lost step is lost as well
            log.error("step_lost", step=step, exc_info=error)
            link.abort(f"step {step} could not be executed")
        if self._device_lost is None and loses_device(error):
            self._device_lost = DeviceLost.after(error, step)
            self._lost.set()

    # -- state ------------------------------------------------------------------------------------

    @property
    def _idle(self) -> bool:
        """The batch may be read when no step is queued: the compute thread then waits."""
        if self._runner is None or self._holder is None:
            return True
        return not self._queued.total() and self._runner.live_rows == 0

    def _ledger(self) -> Ledger:
        return Ledger() if self._runner is None else self._runner.ledger

    def _report(self, doing: str) -> None:
        self._stage = doing

    async def _watch(self, compute: ComputeThread) -> None:
        """Until cancelled: report what takes too long, with what it is doing. Raises DeviceLost as
        soon as the device is lost, and Stalled when the threads stand still."""
        slow = False
        while self._device_lost is None:
            self._progress.look(lambda: compute.submit(lambda: None))
            reason = self._progress.slow()
            if reason is not None and not slow:
                log.error("step_stuck", reason=reason, stack=compute.stack())
            slow = reason is not None
            self._leave_if_stalled()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._lost.wait(), LOOK_S)
        raise self._device_lost

    def _leave_if_stalled(self) -> None:
        """The scheduler hears first, so that requests go on elsewhere however long this process
        takes to end."""
        reason = self._progress.stalled()
        if reason is None:
            return
        if self._holder is not None:
            self._holder.abort(reason)
        log.error("stalled", reason=reason, limit_s=round(self._progress.limit_s))
        dump_stacks()
        raise Stalled(f"{reason}; the process ends, to be started again")


def _send(link: Link, message: Message) -> None:
    """To a link that may be gone: whoever reads it notices."""
    with suppress(LinkClosed):
        link.send(message)

"""One engine and its worker in one process: what the scheduler and worker services do, in a loop.

The worker computes, or launches what a device computes, in a thread of its own, so that planning
and decoding overlap with it; as many steps as the run-ahead depth are out at a time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Final

import structlog

from pagemesh.llm_metrics import Metric, metrics_of
from pagemesh.scheduler_svc.engine import Engine
from pagemesh.scheduler_svc.metrics import EngineView, engine_families
from pagemesh.shared.engine_messages import Submit, Tokens
from pagemesh.shared.messages import EngineStats, ModelCard
from pagemesh.shared.metrics import EngineCollector
from pagemesh.shared.settings import Settings
from pagemesh.worker_svc.build import build_runner
from pagemesh.worker_svc.landing import Landing
from pagemesh.worker_svc.runner import Runner, StepGap

_OWNER: Final = "llm"
AUDIT_PERIOD_S: Final = 60.0

Take = Callable[[Tokens], Sequence[int]]
"""Takes what a step brought, and returns the keys of choices that are over with it."""

log = structlog.get_logger(__name__)


class LLMLoop:
    """Owner of an engine, its runner and the runner's thread. Used by one thread at a time."""

    def __init__(self, settings: Settings) -> None:
        """Loads the prepared model. Raises StartupError."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="worker")
        self._runner: Runner = self._thread.submit(build_runner, settings).result()
        self.max_num_seqs: Final = self._runner.capacity.max_num_seqs
        self._max_waiting = min(settings.scheduler.max_waiting, self.max_num_seqs)
        self._engine = Engine(
            "llm",
            self._runner.card,
            self._runner.capacity,
            settings.scheduler,
            epoch=time.time_ns(),
            prefix_caching=settings.cache.enable_prefix_caching,
        )
        self._out: deque[Future[Landing]] = deque()
        self._audited_s = time.monotonic()

    @property
    def card(self) -> ModelCard:
        return self._runner.card

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats()

    def metrics(self) -> list[Metric]:
        """What the services show of an engine."""
        engine, names = self._engine, self.card.names
        age_s = engine.step_age_s(time.monotonic())
        shown = EngineCollector(lambda: [engine.status()]).collect()
        view = EngineView(names[0], engine.engine_id, engine.counters, age_s)
        return metrics_of([*shown, *engine_families([view])])

    def run(self, queue: deque[Submit], take: Take) -> None:
        """Compute every choice of `queue`, which is empty then; `take` is given what each step
        brings, and may add to the queue.

        However it ends (an interrupt, an exception in `take`, an engine whose books disagree), the
        loop can run again after.
        """
        try:
            while queue or not self._engine.idle:
                self._feed(queue)
                self._launch()
                for tokens in self._land():
                    self._launch()  # the worker computes on while this thread takes
                    self._deliver(tokens, take)
        except BaseException:
            self._start_over()
            raise
        self._audit()

    def _feed(self, queue: deque[Submit]) -> None:
        """Keep the engine's waiting queue short, however many prompts there are."""
        while queue and self._engine.n_waiting < self._max_waiting:
            self._engine.submit(_OWNER, queue.popleft(), time.monotonic())

    def _launch(self) -> None:
        """Hand the worker every step that may be planned now."""
        while (step := self._engine.plan(time.monotonic())) is not None:
            self._out.append(self._thread.submit(self._runner.launch, step))

    def _land(self) -> list[Tokens]:
        """Wait for the oldest step that is out, and take it in."""
        # It stays in the queue while it is waited for, where an interrupt leaves it.
        try:
            result = self._out[0].result().result()
        except StepGap as gap:
            self._take_back(gap)
            return []
        self._out.popleft()
        return list(self._engine.apply(result, time.monotonic()).values())

    def _take_back(self, gap: StepGap) -> None:
        """The worker lost its batch, so no step that is out was computed."""
        while self._out:
            self._out.popleft().exception()
        self._engine.snapshot(gap.last_step)

    def _deliver(self, tokens: Tokens, take: Take) -> None:
        end_keys = take(tokens)
        if end_keys:
            self._engine.end(_OWNER, end_keys, "stop", time.monotonic())

    def _start_over(self) -> None:
        """New books and, with the next step, an empty batch: those at hand may be half written."""
        try:
            self._engine.fail_all("the call was given up")
            for launched in self._out:
                with suppress(Exception):  # what went wrong first is being raised
                    launched.result().wait()
        finally:
            self._out.clear()

    def _audit(self) -> None:
        """Now and then: of a large pool it takes as long as many steps."""
        now_s = time.monotonic()
        if now_s - self._audited_s < AUDIT_PERIOD_S:
            return
        self._audited_s = now_s
        for finding in self._engine.audit():
            log.error("audit", finding=finding)

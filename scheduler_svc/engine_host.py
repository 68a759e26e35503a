"""One engine at work: its core on one side, the link to its worker on the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import structlog

from pagemesh.scheduler_svc.engine import Engine
from pagemesh.scheduler_svc.publisher import PublishedEngine
from pagemesh.shared.engine_messages import NeedSnapshot, Step, StepResult, Submit, Tokens
from pagemesh.shared.errors import LinkClosed, RequestError
from pagemesh.shared.ledger import outcome_of
from pagemesh.shared.link import Link
from pagemesh.shared.messages import EngineStatus
from pagemesh.shared.progress import StepPatience, Wait

# The worker watches itself, and ends with the stacks of its threads: it goes first.
AFTER_THE_WORKER: Final = 1.5
AUDIT_AFTER_S: Final = 1.0
GAVE_UP: Final = "the engine failed and gave this request up"

Deliver = Callable[[dict[str, Tokens]], None]
log = structlog.get_logger(__name__)


class EngineHost:
    """Feeds results and requests to `engine`, and steps to the worker, as soon as there are any.

    An exception inside the engine fails that engine's requests, with a log line and a counter, and
    the engine goes on empty: neither the process nor another engine notices. `deliver` passes
    frames on by owner; `settled` is called whenever the engine may have become idle.
    """

    def __init__(
        self,
        engine: Engine,
        link: Link,
        deliver: Deliver,
        settled: Callable[[], None],
        step_timeout_s: float,
    ) -> None:
        self.engine = engine
        self.published = PublishedEngine(engine)
        self.draining = False
        self._link = link
        self._deliver = deliver
        self._settled = settled
        self._pump_due = False
        self._audited = True
        self._patience = StepPatience(step_timeout_s)
        self._wait = Wait()

    def status(self) -> EngineStatus:
        status = self.engine.status()
        return status._replace(stats=status.stats._replace(index_number=self.published.number))

    def submit(self, owner: str, submit: Submit) -> None:
        """Every request is answered: one that breaks the engine on its way in fails as well."""
        if not submit.arrival_s:
            submit = submit._replace(arrival_s=time.time())
        try:
            self.engine.submit(owner, submit, time.monotonic())
        except RequestError as error:
            # One request may have thousands of choices; the tokenizer service logs it once.
            log.debug("request_refused", request_id=submit.request_id, reason=error.message)
            self._refuse(owner, submit.key, error)
        except Exception:
            entered = submit.key in self.engine.lost().get(owner, ())
            self._give_up()
            if not entered:
                gave_up = RequestError(GAVE_UP, status=500, code="engine_failure")
                self._refuse(owner, submit.key, gave_up)
        else:
            self._pump_soon()

    def end(self, owner: str, keys: list[int], reason: str) -> None:
        with self._guarded():
            self.engine.end(owner, keys, reason, time.monotonic())
        self._pump_soon()

    def drop_owner(self, owner: str) -> int:
        dropped = 0
        with self._guarded():
            dropped = self.engine.drop_owner(owner)
        self._pump_soon()
        return dropped

    def forget_cached(self) -> None:
        """What no request uses."""
        with self._guarded():
            forgotten = self.engine.forget_cached()
            log.info("cache_reset", engine=self.engine.engine_id, blocks=forgotten)

    def on_result(self, result: StepResult) -> None:
        """The next step goes out before the tokens do: the worker must not wait for the mesh."""
        arrived_s = time.monotonic()
        frames: dict[str, Tokens] = {}
        flight = self.engine.oldest
        with self._guarded():
            frames = self.engine.apply(result, arrived_s)
        if flight is not None:
            self._patience.landed(flight.n_tokens, result.elapsed_s)
        self._pump()
        self._deliver(frames)
        self.engine.counters.steps.apply_s.observe(time.monotonic() - arrived_s)

    def on_gap(self, need: NeedSnapshot) -> None:
        with self._guarded():
            self.engine.snapshot(need.last_step)
        self._pump()

    def look(self, lived_s: float) -> None:
        """At what the worker brings, `lived_s` after the last look."""
        self._wait.look(self.engine.oldest, lived_s)

    def overdue_s(self) -> float | None:
        """How long the worker has been at one step, if that is half of what it may or more."""
        age_s = self._wait.age_s
        return age_s if age_s > self._limit_s() / 2 else None

    @property
    def stalled(self) -> bool:
        """The worker has work and brings nothing, though its link lives."""
        return self._wait.age_s > AFTER_THE_WORKER * self._limit_s()

    def eject(self) -> None:
        """Whoever reads the link loses the engine; its requests go on elsewhere."""
        log.error("worker_ejected", engine=self.engine.engine_id, at_one_step_s=self._wait.age_s)
        self._link.abort(f"it has brought no step for {self._wait.age_s:.0f} s")

    def _limit_s(self) -> float:
        flight = self.engine.oldest
        return self._patience.limit_s(flight.n_tokens if flight is not None else 0)

    def expire(self) -> None:
        """Answer those that have waited too long."""
        frames: dict[str, Tokens] = {}
        with self._guarded():
            frames = self.engine.expire(time.monotonic())
        self._deliver(frames)

    def audit_if_idle(self) -> None:
        """Once per idle spell: the books must say that everything is free."""
        if self._audited or self.engine.idle_for_s(time.monotonic()) <= AUDIT_AFTER_S:
            return
        self._audited = True
        findings: list[str] = []
        with self._guarded():
            findings = self.engine.audit()
        if findings:
            log.error("audit_failed", engine=self.engine.engine_id, repaired=findings)

    def _pump_soon(self) -> None:
        """Requests that arrive in one burst enter in one step."""
        if not self._pump_due:
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_due = False
        with self._guarded(), suppress(LinkClosed):
            while (step := self._plan()) is not None:
                self._audited = False
                self._link.send(step)
        self._settled()

    def _plan(self) -> Step | None:
        began_s = time.monotonic()
        step = self.engine.plan(began_s)
        if step is not None:
            self.engine.counters.steps.plan_s.observe(time.monotonic() - began_s)
        return step

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except (RequestError, LinkClosed):
            raise
        except Exception:
            self._give_up()

    def _give_up(self) -> None:
        """Called while the exception is handled."""
        log.exception("engine_failed", engine=self.engine.engine_id)
        self._deliver(self.engine.fail_all(GAVE_UP))
        self._pump_soon()

    def _refuse(self, owner: str, key: int, error: RequestError) -> None:
        self.engine.counters.refused[outcome_of(error.to_wire())] += 1
        failed = [(key, error.to_wire())]
        self._deliver({owner: Tokens(self.engine.engine_id, b"", b"", b"", failed=failed)})

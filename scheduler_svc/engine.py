"""One engine: queues, blocks and steps of one worker group. No I/O, no clock, no event loop.

`plan` decides and commits the next step; `apply` takes in a result. A few steps are out at a time:
a step needs the counts of the one before it, not its tokens. What is found late (an end of
sequence, a preemption) leaves results in flight behind: tokens of a preempted request are still
delivered, in order, and touch no counter; those of a finished request are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from pagemesh.scheduler_svc import notices
from pagemesh.scheduler_svc.backlog import Backlog
from pagemesh.scheduler_svc.block_lists import ContentMap
from pagemesh.scheduler_svc.client import Client
from pagemesh.scheduler_svc.commit import StepWriter
from pagemesh.scheduler_svc.counters import EngineCounters
from pagemesh.scheduler_svc.errors import InvariantError
from pagemesh.scheduler_svc.inflight import InFlight
from pagemesh.scheduler_svc.intake import Intake
from pagemesh.scheduler_svc.lifecycle import Lifecycle
from pagemesh.scheduler_svc.planning import (
    Admission,
    Limits,
    Schedule,
    plan_step,
    unfit_for_snapshot,
)
from pagemesh.scheduler_svc.prefix import PrefixCache
from pagemesh.scheduler_svc.request import Request
from pagemesh.scheduler_svc.residents import Residents
from pagemesh.scheduler_svc.results import BlockContent, ResultReader
from pagemesh.scheduler_svc.run_ahead import RunAhead
from pagemesh.scheduler_svc.step_pace import PaceMeter
from pagemesh.scheduler_svc.tally import ReportEnded, unreported
from pagemesh.shared.engine_messages import Step, StepResult, Submit, Tokens
from pagemesh.shared.ledger import Ledger
from pagemesh.shared.messages import Capacity, EngineStats, EngineStatus, ModelCard, WireError
from pagemesh.shared.settings import SchedulerSettings


class Engine:
    """The scheduler core of one worker group. `epoch` is the worker's incarnation; steps are
    numbered after `after_step`, the last one that an earlier engine sent over the same link. Blocks
    that are `cached` hold what an earlier engine left, least recently used first.
    `report_ended` hears of each request once, when the last of its choices has ended.

    Raises SettingsError when the pool is empty, or when chunked prefill is off and a full prompt
    does not fit one step.
    """

    def __init__(
        self,
        engine_id: str,
        card: ModelCard,
        capacity: Capacity,
        settings: SchedulerSettings,
        *,
        epoch: int,
        prefix_caching: bool,
        after_step: int = 0,
        cached: Sequence[BlockContent] = (),
        report_ended: ReportEnded = unreported,
    ) -> None:
        self.engine_id = engine_id
        self.card = card
        self.capacity = capacity
        self.counters = EngineCounters()
        self._settings = settings
        self._epoch = epoch
        self._prefix_caching = prefix_caching
        self._report_ended = report_ended
        self._limits = Limits.of(card, capacity, settings)
        self._run_ahead = RunAhead(settings.run_ahead_depth)
        self._pace = PaceMeter()
        self._intake = Intake(card, capacity, settings.scheduling_policy)
        self._clients: dict[str, Client] = {}
        self._last_event_s = 0.0
        self._oldest_since_s = 0.0
        self._open_books(after_step)
        if prefix_caching:
            self._residents.blocks.adopt(cached)

    def _open_books(self, after_step: int) -> None:
        """No request, every block free, an empty batch. Results up to `after_step` are nobody's."""
        self._residents = Residents(
            num_blocks=self.capacity.num_blocks,
            max_num_seqs=self._limits.max_num_seqs,
            block_tokens=self.card.block_tokens,
        )
        self._cache = PrefixCache(
            self._residents.blocks, self.card.block_tokens, enabled=self._prefix_caching
        )
        self._lifecycle = Lifecycle(
            self._clients, self._residents, self.counters, self._report_ended
        )
        self._backlog = Backlog(self._settings, self._lifecycle)
        self._results = ResultReader(self._lifecycle, self._cache, self._intake.eos_ids)
        self._writer = StepWriter(self._residents, self._cache, self._epoch, after_step)
        self._inflight: deque[InFlight] = deque()
        self._nobodys_until = after_step

    # -- requests ----------------------------------------------------------------------------------

    def submit(self, owner: str, submit: Submit, now_s: float) -> None:
        """Queue one choice of one request.

        `now_s` is on the clock of `plan` and `apply`; it stands in for an arrival the sender did
        not give.
        Raises RequestError: 400 when it can never be served, 429 when too many wait already.
        """
        client = self._clients.setdefault(owner, Client())
        request = self._intake.build(submit, client, now_s)
        self._backlog.make_room(request, now_s)
        self._cache.extend_hashes(request)
        self._lifecycle.enter(request, parent=client.requests.get(submit.parent))

    def end(self, owner: str, keys: Iterable[int], reason: str, now_s: float) -> None:
        """The owner needs no more tokens: "stop" (its stop string matched) or "abort". Keys that
        ended already are ignored."""
        self._last_event_s = now_s
        client = self._clients.get(owner)
        for key in keys:
            request = client.requests.get(key) if client is not None else None
            if request is not None:
                self._lifecycle.finish(request, reason)

    def drop_owner(self, owner: str) -> int:
        """The owner is gone: abort all it had. Returns how many requests that were."""
        return self._lifecycle.drop(owner)

    def forget_cached(self) -> int:
        """Whatever nobody holds leaves the prefix cache. Returns how many blocks that were."""
        return self._residents.blocks.forget_free()

    def lost(self) -> dict[str, list[int]]:
        """Owner → keys of every unfinished request, for when the worker is gone."""
        return {owner: list(c.requests) for owner, c in self._clients.items() if c.requests}

    def expire(self, now_s: float) -> dict[str, Tokens]:
        """End what has waited too long; owner → what it is to hear of that."""
        self._backlog.expire(now_s)
        return self._lifecycle.take_frames(self.engine_id)

    def fail_all(self, message: str) -> dict[str, Tokens]:
        """End every request in failure and go on with new books and an empty batch.

        The books at hand may be half written, so new ones are opened even if counting raises.
        """
        error = WireError(500, "engine_failure", None, message)
        self.counters.failures += 1
        try:
            failed = [r for client in self._clients.values() for r in client.fail_all(error)]
            for request in failed:
                self._lifecycle.count_end(request, "error")
        finally:
            self._replace_books()
        return self._lifecycle.take_frames(self.engine_id)

    def _replace_books(self) -> None:
        for client in self._clients.values():
            client.forget_all()
        unheard = [*self._residents.running, *self._residents.gone]
        self._open_books(after_step=self._writer.step)
        self._residents.gone = unheard

    # -- steps -------------------------------------------------------------------------------------

    def plan(self, now_s: float) -> Step | None:
        """Commit the next step and return its frame; None when there is nothing to do, or when as
        many steps are out as may be."""
        if len(self._inflight) >= self._run_ahead.depth:
            return None
        if self._writer.snapshot_due and self._inflight:
            return None  # what the worker did compute before the gap must land first
        schedule = self._schedule()
        if schedule.empty and not self._inflight and self._let_parked_go():
            schedule = self._schedule()
        if schedule.empty and (self._inflight or not self._residents.gone):
            return None
        self._last_event_s = now_s
        if not self._inflight:
            self._oldest_since_s = now_s
        return self._commit(schedule, now_s)

    def _schedule(self) -> Schedule:
        return plan_step(
            self._residents,
            self._lifecycle.waiting,
            self._cache,
            self._limits,
            self._inflight,
            self._landed_step,
        )

    def _let_parked_go(self) -> bool:
        """Where nobody computes and nobody can enter, what is kept for forks stands in the way.
        Returns whether there was any."""
        if not self._lifecycle.n_waiting:
            return False
        parked = [request for request in self._residents.running.values() if request.parks]
        for request in parked:
            self._lifecycle.finish(request, "stop")
        return bool(parked)

    def apply(self, result: StepResult, now_s: float) -> dict[str, Tokens]:
        """Take in the result of the oldest step that is out; owner → what it gained.

        Raises InvariantError when it is the result of no such step.
        """
        if result.epoch != self._epoch or result.step <= self._nobodys_until:
            return {}
        if not self._inflight or self._inflight[0].step != result.step:
            raise InvariantError(f"a result of step {result.step}, which is not the oldest out")
        self._last_event_s = self._oldest_since_s = now_s
        flight = self._inflight.popleft()
        round_trip_s = now_s - flight.planned_s
        self.counters.steps.landed(round_trip_s, result.inside_s, result.elapsed_s)
        self._run_ahead.landed(result.elapsed_s)
        self._pace.observe(flight.n_tokens, result.elapsed_s)
        self._results.read(flight, result, self._writer.step, now_s)
        return self._lifecycle.take_frames(self.engine_id)

    def snapshot(self, last_step: int) -> None:
        """The worker ran no step after `last_step`: the next one carries every running request as
        new. Steps it never ran are taken back; requests that entered in them wait again."""
        if last_step < self._writer.snapshot_step:
            return  # asked for before the snapshot already sent got there
        sent = self._writer.step
        notices.snapshot(self.engine_id, last_step, sent)
        while self._inflight and self._inflight[-1].step > last_step:
            flight = self._inflight.pop()
            for request in flight.take_back():
                self._lifecycle.requeue(request, stale_until=sent)
        for request in unfit_for_snapshot(self._residents.running.values()):
            self._lifecycle.requeue(request, stale_until=sent)
        self._residents.forget_order()
        self._writer.snapshot_due = True

    # -- state -------------------------------------------------------------------------------------

    @property
    def last_step(self) -> int:
        """Number of the last step planned."""
        return self._writer.step

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, running or out."""
        busy = self._residents.running or self._lifecycle.n_waiting or self._inflight
        return not busy

    @property
    def n_waiting(self) -> int:
        return self._lifecycle.n_waiting

    def idle_for_s(self, now_s: float) -> float:
        return now_s - self._last_event_s if self.idle else 0.0

    @property
    def oldest(self) -> InFlight | None:
        """The step whose result comes next."""
        return self._inflight[0] if self._inflight else None

    def step_age_s(self, now_s: float) -> float:
        """How long the worker has been at the oldest step that is out."""
        return now_s - self._oldest_since_s if self._inflight else 0.0

    def stats(self) -> EngineStats:
        blocks, counters = self._residents.blocks, self.counters
        return EngineStats(
            running=len(self._residents.running),
            waiting=self._lifecycle.n_waiting,
            kv_usage=1 - blocks.free / blocks.total,
            preemptions_total=counters.preemptions,
            prefix_query_tokens_total=counters.prefix_query_tokens,
            prefix_hit_tokens_total=counters.prefix_hit_tokens,
            waiting_deferred=self._lifecycle.n_held,
            readmitted_query_tokens_total=counters.readmitted_query_tokens,
            readmitted_hit_tokens_total=counters.readmitted_hit_tokens,
            steps=counters.steps.so_far(),
            prefill_tokens=self._prefill_tokens(),
            pace=self._pace.pace(),
            queue_s=self._backlog.queue_s(self._last_event_s),
        )

    def _prefill_tokens(self) -> int:
        """Left to compute of the prompts here. Those that wait are presumed to find as much in the
        cache as others did."""
        entering = self._residents.off_order.values()
        begun = sum(max(0, each.entry_length - each.computed) for each in entering)
        return begun + round(self._lifecycle.waiting.n_tokens * self.counters.prefix_miss_rate)

    def status(self) -> EngineStatus:
        return EngineStatus(self.engine_id, self.card, self.capacity, self.stats())

    @property
    def contents(self) -> ContentMap:
        """What the cache holds now. New books bring a new one."""
        return self._residents.blocks.contents

    def ledger(self) -> Ledger:
        return self.counters.ledger(len(self._residents.running) + self._lifecycle.n_waiting)

    def audit(self) -> list[str]:
        """Prove that blocks and slots add up; repair, count and return what did not."""
        findings = self._residents.audit()
        self.counters.audit_findings += len(findings)
        return findings

    # -- commit ------------------------------------------------------------------------------------

    @property
    def _landed_step(self) -> int:
        """Every result up to this step has arrived or never will."""
        return self._inflight[0].step - 1 if self._inflight else self._writer.step

    def _commit(self, schedule: Schedule, now_s: float) -> Step:
        self._preempt(schedule.preempted)
        self._lifecycle.waiting.drop([admission.request for admission in schedule.admissions])
        n_new = sum(1 for admission in schedule.admissions if not admission.request.preemptions)
        self._backlog.pace.admitted(n_new, self._lifecycle.n_waiting, now_s)
        for admission in schedule.admissions:
            self._count_admission(admission, now_s)
        step, flight = self._writer.write(schedule, self._results.take_sealed(), now_s)
        self._inflight.append(flight)
        self.counters.steps.tokens.observe(flight.n_tokens)
        self._lifecycle.release_computed([chunk.request for chunk in flight.chunks])
        return step

    def _preempt(self, victims: list[Request]) -> None:
        for request in victims:
            request.preemptions += 1
            self.counters.preemptions += 1
            self.counters.preempted_tokens += request.computed
            self._lifecycle.requeue(request, stale_until=self._writer.step)
        if victims:
            total = self.counters.preemptions
            notices.preempted(self.engine_id, victims, total, self.capacity.device)

    def _count_admission(self, admission: Admission, now_s: float) -> None:
        request, prefix = admission.request, admission.prefix
        if prefix.forked_from is not None:
            cached = prefix.forked_from.cached_tokens or 0
        else:
            cached = min(prefix.computed, request.n_prompt)
            if self._cache.reads(request):
                self.counters.count_lookup(
                    len(request.ids), prefix.computed, readmitted=request.preemptions > 0
                )
        if request.cached_tokens is None:
            request.cached_tokens, request.scheduled_s = cached, now_s
            request.client.tallies[request.request_id].begun = True

"""Where each request is, and the only ways it moves: queue → worker → back to the queue, or out."""

from __future__ import annotations

from collections.abc import Iterable

from pagemesh.scheduler_svc.client import Client
from pagemesh.scheduler_svc.counters import EngineCounters
from pagemesh.scheduler_svc.queues import WaitingQueue
from pagemesh.scheduler_svc.request import Request, Status
from pagemesh.scheduler_svc.residents import Residents
from pagemesh.scheduler_svc.tally import ReportEnded, Tally
from pagemesh.shared.engine_messages import Tokens
from pagemesh.shared.messages import WireError


class Lifecycle:
    """Owner of the requests that wait, queued or held back for their leader; the residents own
    the running ones."""

    def __init__(
        self,
        clients: dict[str, Client],
        residents: Residents,
        counters: EngineCounters,
        report_ended: ReportEnded,
    ) -> None:
        self._clients = clients
        self.waiting = WaitingQueue()
        self.residents = residents
        self._counters = counters
        self._report_ended = report_ended
        self._n_held = 0

    @property
    def n_waiting(self) -> int:
        return len(self.waiting) + self._n_held

    @property
    def n_held(self) -> int:
        """Those that wait for their leader."""
        return self._n_held

    def enter(self, request: Request, parent: Request | None = None) -> None:
        """Queue a new request. Choices above 0 of a group wait for choice 0 to have their prompt
        computed, if it is about to; those behind them in the queue do not. That of `parent` is."""
        client = request.client
        # The tally first: what is in `requests` has one, wherever an interrupt lands.
        client.tallies.setdefault(request.request_id, Tally(request.request_id)).enter()
        client.requests[request.key] = request
        self._counters.received += 1
        leader = client.leaders.get(request.group)
        if parent is not None and _begins_with_prompt_of(parent, request):
            request.leader = parent
        if request.group and request.choice == 0:
            client.leaders[request.group] = request
        elif leader is not None and _begins_with_prompt_of(leader, request):
            request.leader = leader
            if _will_compute_prompt(leader):
                self._hold(request, leader)
                return
        self.waiting.push(request)

    def release_computed(self, prefills: Iterable[Request]) -> None:
        """A step with `prefills` is planned: release the followers of prompts it completes."""
        if self._n_held == 0:
            return
        for request in prefills:
            if request.followers and request.computed >= request.n_prompt:
                self.release_followers(request)

    def release_followers(self, leader: Request) -> None:
        """The prompt of `leader` is computed, or will not be: its followers queue like anyone."""
        for follower in leader.followers:
            follower.status = Status.WAITING
            self.waiting.push(follower)
        self._n_held -= len(leader.followers)
        leader.followers = []

    def requeue(self, request: Request, stale_until: int) -> None:
        """Off the worker and back to the queue with nothing computed. Results of steps up to
        `stale_until` may still bring tokens; until then its `ids` are not complete."""
        self.residents.evict(request)
        request.status = Status.PREEMPTED
        request.forget_progress()
        request.stale_until = stale_until
        self.release_followers(request)
        self.waiting.push(request)

    def finish(self, request: Request, reason: str) -> None:
        """The one end of a request. A second call does nothing."""
        if request.status is Status.FINISHED:
            return
        self._leave(request)
        request.status = Status.FINISHED
        request.leader = None  # the leader knows its forks: no cycle may outlive them
        self.release_followers(request)
        client = request.client
        del client.requests[request.key]
        if client.leaders.get(request.group) is request:
            del client.leaders[request.group]
        self.count_end(request, reason)

    def count_end(self, request: Request, reason: str) -> None:
        """Needs no sound books: a request without a tally is counted and not reported."""
        self._counters.finished[reason] += 1
        tallies = request.client.tallies
        tally = tallies.get(request.request_id)
        if tally is None:
            return
        tally.end(request, reason)
        if tally.unended == 0:
            del tallies[request.request_id]
            self._report_ended(tally)

    def turn_away(self, request: Request, error: WireError) -> None:
        """End a request that waits and was never begun."""
        request.client.failed.append((request.key, error))
        self.finish(request, "rejected")

    def fail(self, request: Request, error: WireError, step: int, sent_step: int) -> None:
        """End `request` in failure: what it computed in `step` is worthless. So is what forks took
        over before that was known, even if the request itself is over. Others that borrowed from it
        start again; steps up to `sent_step` are out."""
        self._fail(request, error)
        for fork in request.forks:
            if fork.admitted_step > step:
                self._fail(fork, error)
        self._void_borrowers(request, step, sent_step)

    def _void_borrowers(self, lender: Request, step: int, sent_step: int) -> None:
        borrowers, lender.borrowers = lender.borrowers, []
        for request, _ in borrowers:
            if request.status is Status.RUNNING and request.admitted_step > step:
                forks, request.forks = request.forks, []
                for dependent in (request, *forks):
                    self._void(dependent, step, sent_step)

    def _void(self, request: Request, step: int, sent_step: int) -> None:
        """Back to the queue: nothing that steps in flight do for it counts."""
        if request.status is Status.RUNNING:
            self.requeue(request, stale_until=sent_step)
            request.void = True
            self._void_borrowers(request, step, sent_step)

    def _fail(self, request: Request, error: WireError) -> None:
        """What it computed before is suspect, so the cache forgets it."""
        if request.status is not Status.FINISHED:
            self.residents.blocks.forget(request.blocks)
            request.client.failed.append((request.key, error))
            self.finish(request, "error")

    def drop(self, owner: str) -> int:
        """Abort all that `owner` had. Returns how many requests that were."""
        client = self._clients.pop(owner, None)
        requests = list(client.requests.values()) if client is not None else []
        for request in requests:
            self.finish(request, "abort")
        return len(requests)

    def take_frames(self, engine_id: str) -> dict[str, Tokens]:
        """Owner → its frame, where there is anything to say."""
        frames = ((owner, client.take_frame(engine_id)) for owner, client in self._clients.items())
        return {owner: frame for owner, frame in frames if frame is not None}

    def _hold(self, request: Request, leader: Request) -> None:
        request.status = Status.HELD
        leader.followers.append(request)
        self._n_held += 1

    def _leave(self, request: Request) -> None:
        if request.status is Status.RUNNING:
            self.residents.evict(request)
        elif request.status is Status.HELD and request.leader is not None:
            request.leader.followers.remove(request)
            self._n_held -= 1
        else:
            self.waiting.remove(request)


def _begins_with_prompt_of(leader: Request, request: Request) -> bool:
    n = leader.n_prompt
    return (
        request.n_prompt >= n
        and request.cache_salt == leader.cache_salt
        and request.ids[:n] == leader.ids[:n]
    )


def _will_compute_prompt(leader: Request) -> bool:
    """A preempted leader may be gone for long, so nobody waits for it."""
    running = leader.status is Status.RUNNING and leader.computed < leader.n_prompt
    return running or leader.status is Status.WAITING

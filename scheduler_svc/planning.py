"""What the next step does: pure functions of the requests' counters and the free blocks.

One rule for everything: each request lets `computed` catch up with `length`. Chunked prefill,
prefix hits, decode and resume are that rule. Running requests go first (decodes, then unfinished
prefills), then waiting ones; a step that preempts admits nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pagemesh.scheduler_svc.blocks import Allocation, BlockManager, blocks_for
from pagemesh.scheduler_svc.errors import InvariantError
from pagemesh.scheduler_svc.prefix import Prefix, PrefixCache
from pagemesh.scheduler_svc.request import Request


class Limits(NamedTuple):
    """What the worker and the settings allow."""

    budget_tokens: int
    max_num_seqs: int
    block_tokens: int
    watermark_blocks: int
    chunked_prefill: bool


class Rows(NamedTuple):
    """The running requests' part of a step. `growing` decodes need one more block each."""

    decodes: list[Request]
    chunks: list[tuple[Request, int]]
    growing: list[Request]
    budget_left: int


class Admission(NamedTuple):
    """A waiting request enters: its blocks, of which `prefix` is computed, and its first chunk."""

    request: Request
    prefix: Prefix
    allocation: Allocation
    n_tokens: int


class Schedule(NamedTuple):
    """A planned step, not yet committed."""

    rows: Rows
    preempted: list[Request]
    admissions: list[Admission]

    @property
    def empty(self) -> bool:
        return not (self.rows.decodes or self.rows.chunks or self.admissions)


def plan_step(
    running: Sequence[Request],
    waiting: Iterable[Request],
    cache: PrefixCache,
    blocks: BlockManager,
    limits: Limits,
    landed_step: int,
) -> Schedule:
    """Plan one step. Results of steps up to `landed_step` have arrived."""
    rows = plan_running(running, limits)
    if len(rows.growing) > blocks.free:
        rows, preempted = make_room(running, blocks, limits)
        return Schedule(rows, preempted, [])
    planner = _Admissions(running, rows, cache, blocks, limits)
    return Schedule(rows, [], planner.plan(waiting, landed_step))


def plan_running(running: Iterable[Request], limits: Limits) -> Rows:
    """Every decode that the budget holds, then prefill chunks with what is left of it."""
    decodes: list[Request] = []
    growing: list[Request] = []
    prefills: list[Request] = []
    for request in running:
        length = request.length
        if length >= request.plan_limit:
            continue  # its last token is on its way
        computed = request.computed
        if length - computed > 1:
            prefills.append(request)
            continue
        decodes.append(request)
        if computed >= request.room_tokens:
            growing.append(request)
    if len(decodes) > limits.budget_tokens:
        # Those left out wait for the end of earlier ones only: nobody enters beside them.
        del decodes[limits.budget_tokens :]
        growing = [request for request in decodes if request.computed >= request.room_tokens]
    budget = limits.budget_tokens - len(decodes)
    chunks, budget = _chunks(prefills, budget)
    return Rows(decodes, chunks, growing, budget)


def _chunks(prefills: list[Request], budget: int) -> tuple[list[tuple[Request, int]], int]:
    chunks: list[tuple[Request, int]] = []
    for request in prefills:
        n = min(request.length - request.computed, budget)
        if n == 0:
            break
        chunks.append((request, n))
        budget -= n
    return chunks, budget


def make_room(
    running: Sequence[Request], blocks: BlockManager, limits: Limits
) -> tuple[Rows, list[Request]]:
    """Preempt from the worst on until what the others need is free.

    Worst: lowest priority, then latest arrival. The best request is never a victim: alone it fits,
    or it would not have been accepted. So somebody always advances.
    """
    stay = sorted(running, key=lambda request: request.order)
    preempted: list[Request] = []
    while len(stay) > 1:
        preempted.append(stay.pop())
        rows = plan_running(stay, limits)
        free = blocks.free + blocks.gain([request.blocks for request in preempted])
        if len(rows.growing) <= free:
            return rows, preempted
    raise InvariantError("one request alone does not fit the KV pool")


class _Admissions:
    """Admission in queue order, until someone does not fit: that keeps first come, first served.

    The gate is the whole sequence, not its first chunk, or half-computed prompts would lock each
    other out of memory.
    """

    def __init__(
        self,
        running: Sequence[Request],
        rows: Rows,
        cache: PrefixCache,
        blocks: BlockManager,
        limits: Limits,
    ) -> None:
        self._cache = cache
        self._blocks = blocks
        self._limits = limits
        self._n_running = len(running)
        self._budget = rows.budget_left
        self._free = blocks.free - len(rows.growing)
        self._touched: set[int] = set()

    def plan(self, waiting: Iterable[Request], landed_step: int) -> list[Admission]:
        admissions: list[Admission] = []
        for request in waiting:
            if self._n_running == self._limits.max_num_seqs or self._budget == 0:
                break
            if request.stale_until > landed_step:
                break  # tokens of its former life are on their way: `ids` is not complete
            admission = self._admit(request)
            if admission is None:
                break
            self._take(admission)
            admissions.append(admission)
        return admissions

    def _admit(self, request: Request) -> Admission | None:
        prefix = self._cache.find(request)
        n_blocks = blocks_for(len(request.ids), self._limits.block_tokens)
        allocation = self._blocks.plan(n_blocks, prefix.blocks, self._touched)
        if allocation.n_free > self._free - self._reserve(request):
            return None
        work = len(request.ids) - prefix.computed
        if work > self._budget and not self._limits.chunked_prefill:
            return None
        return Admission(request, prefix, allocation, min(work, self._budget))

    def _reserve(self, request: Request) -> int:
        """Blocks to leave free. With nothing else running there is nothing to protect. Who was
        preempted returns only when everyone can grow by a block, or it would thrash."""
        if self._n_running == 0:
            return 0
        growth = self._n_running if request.preemptions else 0
        return self._limits.watermark_blocks + growth

    def _take(self, admission: Admission) -> None:
        self._n_running += 1
        self._budget -= admission.n_tokens
        self._free -= admission.allocation.n_free
        self._touched.update(admission.allocation.hit)

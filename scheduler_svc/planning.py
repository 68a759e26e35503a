"""What the next step does: pure functions of the requests' counters and the free blocks.

One rule for everything: each request lets `computed` catch up with `length`. Chunked prefill,
prefix hits, decode and resume are that rule. Running requests go first (decodes, then unfinished
prefills), then waiting ones; a step that preempts admits nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil
from typing import Final, NamedTuple

from pagemesh.scheduler_svc.blocks import Allocation, BlockManager, blocks_for
from pagemesh.scheduler_svc.borrowing import Borrowing
from pagemesh.scheduler_svc.errors import InvariantError
from pagemesh.scheduler_svc.inflight import InFlight
from pagemesh.scheduler_svc.prefix import Prefix, PrefixCache
from pagemesh.scheduler_svc.queues import WaitingQueue
from pagemesh.scheduler_svc.request import Request, Status
from pagemesh.scheduler_svc.residents import Residents
from pagemesh.shared.errors import SettingsError
from pagemesh.shared.messages import Capacity, ModelCard
from pagemesh.shared.settings import SchedulerSettings
from pagemesh.shared.wire import MAX_FRAME_BYTES

# Of the rows that enter in one step, and of those in a snapshot: both fit one frame.
MAX_ROWS_BYTES: Final = MAX_FRAME_BYTES // 4


class Limits(NamedTuple):
    """What the worker and the settings allow."""

    budget_tokens: int
    max_num_seqs: int
    block_tokens: int
    watermark_blocks: int
    chunked_prefill: bool

    @classmethod
    def of(cls, card: ModelCard, capacity: Capacity, settings: SchedulerSettings) -> Limits:
        """Raises SettingsError when the pool is empty, or when chunked prefill is off and a full
        prompt does not fit one step."""
        budget = capacity.max_num_batched_tokens
        if capacity.num_blocks < 2:
            raise SettingsError("the KV pool has no block for requests", key="kv_cache_memory")
        if not settings.enable_chunked_prefill and budget < card.max_model_len:
            raise SettingsError(
                "without chunked prefill a step must hold a whole prompt: "
                f"--max-num-batched-tokens is {budget} and must be at least --max-model-len "
                f"({card.max_model_len})",
                key="enable_chunked_prefill",
            )
        return cls(
            budget_tokens=budget,
            max_num_seqs=min(settings.max_num_seqs or capacity.max_num_seqs, capacity.max_num_seqs),
            block_tokens=card.block_tokens,
            watermark_blocks=ceil(settings.watermark * (capacity.num_blocks - 1)),
            chunked_prefill=settings.enable_chunked_prefill,
        )


class Rows(NamedTuple):
    """The running requests' part of a step. `decodes` is the new order: that of the last step (the
    same list, if it is unchanged) without those that left or are `paused`, then `joined`. `growing`
    decodes need one more block each."""

    decodes: list[Request]
    joined: list[Request]
    paused: list[Request]
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
    residents: Residents,
    waiting: WaitingQueue,
    cache: PrefixCache,
    limits: Limits,
    flights: Sequence[InFlight],
    landed_step: int,
) -> Schedule:
    """Plan one step. Results of steps up to `landed_step` have arrived, those of `flights` not."""
    blocks = residents.blocks
    decoding, due = residents.decoding, residents.due
    rows = plan_running(decoding, due, residents.off_order.values(), limits)
    if len(rows.growing) > blocks.free:
        rows, preempted = make_room(residents, limits)
        return Schedule(rows, preempted, [])
    if not waiting:
        return Schedule(rows, [], [])
    borrowing = Borrowing(flights, rows.chunks, limits.block_tokens)
    planner = _Admissions(len(residents.running), rows, cache, borrowing, blocks, limits)
    return Schedule(rows, [], planner.plan(waiting, landed_step))


def unfit_for_snapshot(running: Iterable[Request]) -> list[Request]:
    """Who must begin again when the worker has lost its batch: what it had added up of them is
    gone, or there is no more room in a frame."""
    unfit, n_bytes = [], 0
    for request in running:
        fits = n_bytes == 0 or n_bytes + request.row_bytes <= MAX_ROWS_BYTES
        if fits and not request.computes_all:
            n_bytes += request.row_bytes
        else:
            unfit.append(request)
    return unfit


def plan_running(
    decoding: list[Request], due: list[Request], off_order: Iterable[Request], limits: Limits
) -> Rows:
    """Every decode that the budget holds, then prefill chunks with what is left of it.

    `decoding` is the decode order of the last step, `due` those of it that may not just go on,
    `off_order` whoever else runs.
    """
    decodes, growing, paused = _go_on(decoding, due)
    joined, prefills = _caught_up(off_order)
    # Those left out wait for the end of earlier ones only: nobody enters beside them.
    del joined[limits.budget_tokens - len(decodes) :]
    if joined:
        decodes = decodes + joined
        growing = growing + [r for r in joined if r.computed >= r.room_tokens]
    chunks, budget = _chunks(prefills, limits.budget_tokens - len(decodes))
    return Rows(decodes, joined, paused, chunks, growing, budget)


def _go_on(
    decoding: list[Request], due: list[Request]
) -> tuple[list[Request], list[Request], list[Request]]:
    """Who decodes on, which of them need a block, and who pauses: the last token of those is on
    its way. The list itself if everyone decodes on."""
    running = [request for request in due if request.status is Status.RUNNING]
    growing = [request for request in running if request.computed < request.plan_limit - 1]
    if len(growing) == len(due):
        return decoding, growing, []
    paused = [request for request in running if request.computed >= request.plan_limit - 1]
    out = set(due).difference(growing)
    return [request for request in decoding if request not in out], growing, paused


def _caught_up(off_order: Iterable[Request]) -> tuple[list[Request], list[Request]]:
    """Who begins to decode, and who has more of its known tokens to compute."""
    joined: list[Request] = []
    prefills: list[Request] = []
    for request in off_order:
        if request.length >= request.plan_limit:
            continue  # its last token is on its way
        (joined if request.length > request.entry_length else prefills).append(request)
    return joined, prefills


def _chunks(prefills: list[Request], budget: int) -> tuple[list[tuple[Request, int]], int]:
    chunks: list[tuple[Request, int]] = []
    for request in prefills:
        n = min(request.length - request.computed, budget)
        if n == 0:
            break
        chunks.append((request, n))
        budget -= n
    return chunks, budget


def make_room(residents: Residents, limits: Limits) -> tuple[Rows, list[Request]]:
    """Preempt from the worst on until what the others need is free.

    Worst: lowest priority, then latest arrival. The best request is never a victim: alone it fits,
    or it would not have been accepted. So somebody always advances.
    """
    blocks, off_order = residents.blocks, residents.off_order
    stay = sorted(residents.running.values(), key=lambda request: request.order)
    preempted: list[Request] = []
    while len(stay) > 1:
        preempted.append(stay.pop())
        on = [request for request in residents.decoding if request not in preempted]
        due = [request for request in residents.due if request not in preempted]
        off = [request for request in off_order.values() if request not in preempted]
        rows = plan_running(on, due, off, limits)
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
        n_running: int,
        rows: Rows,
        cache: PrefixCache,
        borrowing: Borrowing,
        blocks: BlockManager,
        limits: Limits,
    ) -> None:
        self._cache = cache
        self._borrowing = borrowing
        self._blocks = blocks
        self._limits = limits
        self._n_running = n_running
        self._budget = rows.budget_left
        self._free = blocks.free - len(rows.growing)
        self._bytes_left = MAX_ROWS_BYTES
        self._touched: set[int] = set()

    def plan(self, waiting: Iterable[Request], landed_step: int) -> list[Admission]:
        admissions: list[Admission] = []
        for request in waiting:
            if self._n_running == self._limits.max_num_seqs or self._budget == 0:
                break
            if request.stale_until > landed_step:
                break  # tokens of its former life are on their way: `ids` is not complete
            if admissions and request.row_bytes > self._bytes_left:
                break
            prefix = self._find(request)
            if self._waits_for_others(request, prefix):
                continue
            admission = self._admit(request, prefix)
            if admission is None:
                break
            self._take(admission)
            admissions.append(admission)
        return admissions

    def _find(self, request: Request) -> Prefix:
        prefix = self._cache.find(request)
        if prefix.forked_from is not None or not self._cache.reads(request):
            return prefix
        return self._borrowing.extended(request, prefix)

    def _waits_for_others(self, request: Request, prefix: Prefix) -> bool:
        """One step, not more: then what they compute now can be borrowed."""
        return self._cache.reads(request) and self._borrowing.pays_to_wait(request, prefix)

    def _admit(self, request: Request, prefix: Prefix) -> Admission | None:
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
        self._bytes_left -= admission.request.row_bytes
        self._free -= admission.allocation.n_free
        self._touched.update(admission.allocation.hit)
        prefix = admission.prefix
        n_computed = prefix.computed + admission.n_tokens
        self._borrowing.enter(admission.request, len(prefix.blocks), n_computed)

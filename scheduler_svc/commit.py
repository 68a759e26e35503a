"""Commit a planned step: take the blocks and slots, advance the counters, write the frame."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pagemesh.scheduler_svc.inflight import Chunk, InFlight
from pagemesh.scheduler_svc.planning import Admission, Schedule
from pagemesh.scheduler_svc.prefix import PrefixCache
from pagemesh.scheduler_svc.request import Borrower, Request
from pagemesh.scheduler_svc.residents import Residents
from pagemesh.shared.engine_messages import NewRow, Step
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.wire import pack_ids


class StepWriter:
    """Owner of the step numbers; all that changes the books for a step happens in `write`."""

    def __init__(
        self, residents: Residents, cache: PrefixCache, epoch: int, after_step: int
    ) -> None:
        self.step = after_step
        self.snapshot_due = True
        """The next step starts from an empty batch: the first, or one after a gap."""
        self.snapshot_step = after_step
        """The last step that did."""
        self._residents = residents
        self._cache = cache
        self._epoch = epoch

    def write(
        self, schedule: Schedule, sealed: list[tuple[int, bytes]], now_s: float
    ) -> tuple[Step, InFlight]:
        """Commit `schedule` (victims are out already) and return its frame and its record."""
        self.step += 1
        base = self.step - 1
        if self.snapshot_due:
            base, self.snapshot_step = 0, self.step
        rows = schedule.rows
        copies = self._admit(schedule.admissions)
        self._residents.reorder(rows.decodes, rows.joined, rows.paused)
        grown = self._grow(rows.growing)
        new = self._new_rows(schedule.admissions)
        flight = self._advance(schedule, now_s)
        sealed = [pair for pair in sealed if self._residents.blocks.holds(*pair)]
        step = Step(
            epoch=self._epoch,
            step=self.step,
            base=base,
            n_rows=flight.n_rows,
            n_tokens=flight.n_tokens,
            gone=_packed(self._residents.gone if base else []),
            new=new,
            grown=_packed(grown if base else []),
            copies=_packed(copies),
            paused=_packed([request.slot for request in rows.paused]),
            joined=_packed([request.slot for request in rows.joined]),
            chunks=_pack_chunks(flight.chunks),
            sealed=_packed([block for block, _ in sealed]),
            sealed_hashes=b"".join([content for _, content in sealed]),
        )
        self._residents.gone = []
        self.snapshot_due = False
        return step, flight

    def _admit(self, admissions: list[Admission]) -> list[int]:
        """Returns the (source, destination) pairs to copy, flat."""
        copies: list[int] = []
        tables = self._residents.blocks.commit([a.allocation for a in admissions])
        for admission, blocks in zip(admissions, tables, strict=True):
            request, prefix = admission.request, admission.prefix
            self._residents.admit(request, blocks, prefix.computed, self.step)
            if prefix.lenders:
                # It publishes what its lenders do not come to.
                self._cache.begin(request, 0)
                for lender in prefix.lenders:
                    lender.borrowers.append(Borrower(request, prefix.computed))
                continue
            if prefix.forked_from is None:
                self._cache.begin(request, len(prefix.blocks))
                continue
            # What a fork shares may still be in flight; it publishes what its leader did not.
            self._cache.begin(request, 0)
            if prefix.forked_from.confirmed < prefix.computed:
                prefix.forked_from.forks.append(request)
            if prefix.copy_from is not None:
                copies += (prefix.copy_from, blocks[len(prefix.blocks)])
        return copies

    def _grow(self, growing: list[Request]) -> list[int]:
        """Returns the (slot, block) pairs, flat."""
        grown: list[int] = []
        fresh = self._residents.blocks.take(len(growing))
        for request, block in zip(growing, fresh, strict=True):
            self._residents.grow(request, block)
            grown += (request.slot, block)
        return grown

    def _new_rows(self, admissions: list[Admission]) -> list[NewRow]:
        """Before the counters advance: `computed` is what the blocks hold at the start."""
        entering: Iterable[Request] = (admission.request for admission in admissions)
        if self.snapshot_due:
            entering = self._residents.running.values()
        return [_new_row(request) for request in entering]

    def _advance(self, schedule: Schedule, now_s: float) -> InFlight:
        """Rows of one token first. A row that catches up gets a token on the worker."""
        decodes, due = schedule.rows.decodes, []
        for request in decodes:
            request.computed = computed = request.computed + 1
            request.length += 1
            if computed >= request.due_at:
                due.append(request)
        self._residents.due = due
        prefills = [*schedule.rows.chunks, *((a.request, a.n_tokens) for a in schedule.admissions)]
        prefills.sort(key=lambda row: row[1] > 1)
        return InFlight(self.step, decodes, [_advance_chunk(*row) for row in prefills], now_s)


def _advance_chunk(request: Request, n_tokens: int) -> Chunk:
    request.computed += n_tokens
    caught_up = request.computed == request.length
    request.length += caught_up
    return Chunk(request, n_tokens, caught_up)


def _packed(ids: list[int]) -> bytes:
    """Most arrays of most frames are empty."""
    return pack_ids(ids) if ids else b""


def _pack_chunks(chunks: list[Chunk]) -> bytes:
    return _packed([n for chunk in chunks for n in (chunk.request.slot, chunk.n_tokens)])


def _new_row(request: Request) -> NewRow:
    return NewRow(
        slot=request.slot,
        ids=pack_ids(request.ids),
        n_prompt=request.n_prompt,
        seed=request.seed,
        params=_params(request),
        blocks=pack_ids(request.blocks),
        computed=request.computed,
        request_id=request.request_id,
        pooling=request.pooling,
    )


def _params(request: Request) -> SamplingParams:
    """Without prompt logprobs where nobody waits for them any more."""
    params = request.params
    if params.prompt_logprobs is None or request.prompt_logprobs_from < request.n_prompt:
        return params
    return msgspec.structs.replace(params, prompt_logprobs=None)

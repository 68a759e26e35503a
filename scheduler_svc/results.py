"""Taking in a step's result: confirm, deliver, publish, stop."""

from __future__ import annotations

from collections.abc import Sequence

from pagemesh.scheduler_svc import notices
from pagemesh.scheduler_svc.client import Client
from pagemesh.scheduler_svc.errors import InvariantError
from pagemesh.scheduler_svc.inflight import Chunk, InFlight
from pagemesh.scheduler_svc.lifecycle import Lifecycle
from pagemesh.scheduler_svc.prefix import PrefixCache
from pagemesh.scheduler_svc.request import Request, Status
from pagemesh.scheduler_svc.stops import Stop, stop_after
from pagemesh.shared.engine_messages import Ended, StepResult
from pagemesh.shared.messages import WireError
from pagemesh.shared.wire import unpack_ids

BlockContent = tuple[int, bytes]


class ResultReader:
    """Applies results to the requests, and remembers what that published for the next step."""

    def __init__(self, lifecycle: Lifecycle, cache: PrefixCache, eos_ids: frozenset[int]) -> None:
        self._sealed: list[BlockContent] = []
        self._lifecycle = lifecycle
        self._cache = cache
        self._eos_ids = eos_ids

    def read(self, flight: InFlight, result: StepResult, sent_step: int, now_s: float) -> None:
        """`sent_step`: the last step that is out."""
        sampled = unpack_ids(result.sampled)
        if len(sampled) != flight.n_rows:
            raise InvariantError(
                f"step {flight.step} has {flight.n_rows} rows, its result {len(sampled)}"
            )
        # Failures first: the rows they end are then dropped like any other finished request's.
        self._fail_rows(flight, result, sent_step)
        self._fail_unsampled(flight, sampled, sent_step)
        self._pass_on_logprobs(flight, result)
        self._pass_on_vectors(flight, result)
        n_decodes = len(flight.decodes)
        self._take_in_decodes(flight.decodes, sampled[:n_decodes])
        for chunk, token in zip(flight.chunks, sampled[n_decodes:], strict=True):
            self._take_in_chunk(chunk, token, now_s)

    def take_sealed(self) -> list[BlockContent]:
        """(block, hash) pairs published since the last call."""
        sealed, self._sealed = self._sealed, []
        return sealed

    def _take_in_decodes(self, decodes: Sequence[Request], sampled: Sequence[int]) -> None:
        """The hot loop: one pass over the rows, nothing allocated for a row that just goes on."""
        running = Status.RUNNING
        woken: list[Request] = []
        client: Client | None = None
        for request, token in zip(decodes, sampled, strict=True):
            if request.status is not running:
                self._deliver_stale(request, token)
                continue
            if request.client is not client:
                client = request.client
                tell_key, tell_id = client.keys.append, client.ids.append
            ids = request.ids
            ids.append(token)
            tell_key(request.key)
            tell_id(token)
            if len(ids) >= request.wake_length or token in request.stop_ids:
                woken.append(request)
        self._sealed += self._cache.publish_decoded(woken)
        for request in woken:
            token = request.ids[-1]
            if len(request.ids) >= request.max_length or token in request.stop_ids:
                self._stop_if_over(request, token)

    def _take_in_chunk(self, chunk: Chunk, token: int, now_s: float) -> None:
        request, n_tokens, samples = chunk
        if request.void:
            return
        if samples and not request.start_told and request.status is not Status.FINISHED:
            request.client.tell_start(request, now_s)
        if request.status is not Status.RUNNING:
            if samples:
                self._deliver_stale(request, token)
            return
        request.confirmed += n_tokens
        request.forget_borrowers()
        if request.confirmed >= request.publish_at:
            self._sealed += self._cache.publish(request)
        if samples and request.prefill_only:
            self._end(request, Stop("length"))
        elif samples:
            self._deliver(request, token)

    def _deliver_stale(self, request: Request, token: int) -> None:
        """Of a preempted request: the token is good, and the request known one longer; nothing is
        computed for it. Of a finished request nobody wants it."""
        if request.status is Status.PREEMPTED and not (request.prefill_only or request.void):
            request.length += 1
            self._deliver(request, token)

    def _deliver(self, request: Request, token: int) -> None:
        request.ids.append(token)
        request.client.keys.append(request.key)
        request.client.ids.append(token)
        self._stop_if_over(request, token)

    def _stop_if_over(self, request: Request, token: int) -> None:
        stop = stop_after(request, token, self._eos_ids)
        if stop is not None:
            self._end(request, stop)

    def _end(self, request: Request, stop: Stop) -> None:
        request.client.ended.append(Ended(request.key, stop.reason, stop.token_id))
        self._lifecycle.finish(request, stop.reason)

    # -- rows that are not plain -----------------------------------------------------------------

    def _fail_rows(self, flight: InFlight, result: StepResult, sent_step: int) -> None:
        for row in result.nonfinite:
            message = "the model produced NaN or infinite logits for this request"
            error = WireError(500, "nonfinite_logits", None, message)
            self._fail(_row(flight, row), error, flight, sent_step)
        failed = [(_row(flight, row), reason) for row, reason in result.failed]
        if failed:
            notices.rows_failed(flight.step, failed)
        for request, _ in failed:
            error = WireError(500, "step_failed", None, "the worker failed on this request")
            self._fail(request, error, flight, sent_step)

    def _fail(self, request: Request, error: WireError, flight: InFlight, sent_step: int) -> None:
        """What is void already failed because a lender did."""
        if not request.void:
            self._lifecycle.fail(request, error, flight.step, sent_step)

    def _fail_unsampled(self, flight: InFlight, sampled: Sequence[int], sent_step: int) -> None:
        """A row that should have sampled and did not would wait for ever."""
        if min(sampled, default=0) >= 0:
            return
        error = WireError(500, "step_failed", None, "the worker sampled no token")
        due = [*flight.decodes, *(c.request if c.samples else None for c in flight.chunks)]
        for request, token in zip(due, sampled, strict=True):
            if request is not None and token < 0:
                self._fail(request, error, flight, sent_step)

    def _pass_on_logprobs(self, flight: InFlight, result: StepResult) -> None:
        """Before tokens are taken in: a request alive now gets its token."""
        for row in result.logprobs:
            request = _row(flight, row.key)
            over = request.status is Status.FINISHED or request.void
            if not over and not request.prefill_only:
                request.client.logprobs.append(row._replace(key=request.key))
        for rows in result.prompt_logprobs:
            request = _row(flight, rows.key)
            if request.status is not Status.FINISHED and not request.void:
                request.prompt_logprobs_from = request.client.add_prompt_logprobs(
                    request.key, rows, request.prompt_logprobs_from
                )

    def _pass_on_vectors(self, flight: InFlight, result: StepResult) -> None:
        """They come with the end of a prompt. A request that was preempted computes it again."""
        for pooled in result.pooled:
            request = _row(flight, pooled.key)
            if request.status is Status.RUNNING:
                request.client.pooled.append(pooled._replace(key=request.key))


def _row(flight: InFlight, row: int) -> Request:
    if not 0 <= row < flight.n_rows:
        raise InvariantError(f"step {flight.step} has no row {row}")
    n_decodes = len(flight.decodes)
    return flight.decodes[row] if row < n_decodes else flight.chunks[row - n_decodes].request

"""What the engines generate, on its way to the gateways that asked for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import structlog

from pagemesh.shared.engine_messages import Submit, Tokens
from pagemesh.shared.ledger import outcome_of
from pagemesh.shared.messages import Delta, Failed, WireError
from pagemesh.tokenizer_svc.logprobs import pieces
from pagemesh.tokenizer_svc.metrics import TokenizerMetrics
from pagemesh.tokenizer_svc.outbox import Outbox
from pagemesh.tokenizer_svc.pipeline import Pipeline
from pagemesh.tokenizer_svc.placement import Placement
from pagemesh.tokenizer_svc.requests import Request, RequestTable, public_error

log = structlog.get_logger(__name__)


class Delivery:
    """Owner of nothing: the pipeline makes text of tokens, the placement knows the engines, and the
    table who asked."""

    def __init__(
        self,
        pipeline: Pipeline,
        placement: Placement,
        requests: RequestTable,
        metrics: TokenizerMetrics,
    ) -> None:
        self._pipeline = pipeline
        self._placement = placement
        self._requests = requests
        self._metrics = metrics

    async def take(self, tokens: Tokens) -> None:
        """Prompt logprobs come by the ten thousand: the loop turns between pieces of them."""
        arrived_s = time.monotonic()
        for piece in pieces(tokens.prompt_logprobs):
            self._pipeline.add_prompt_logprobs(piece)
            await asyncio.sleep(0)
        fed = self._pipeline.feed(tokens._replace(prompt_logprobs=[]))
        self._placement.begun(started.key for started in tokens.started)
        self._placement.release(end.key for end in tokens.ended)
        self._placement.release(key for key, _ in tokens.failed)
        self._placement.end(fed.end_keys, "stop")
        for begun in fed.begun:
            request = self._requests.get(begun.request_id)
            if request is not None:
                request.outbox.begin(begun)
        self.deliver(fed.deltas, arrived_s)

    def deliver(self, deltas: Iterable[Delta], arrived_s: float) -> None:
        """`arrived_s` is when what they are made of came. Several choices of a request may end in
        one frame, so it is let go after the last."""
        n_tokens = 0
        ended: set[str] = set()
        outbox: Outbox | None = None
        for delta in deltas:
            request = self._requests.get(delta.request_id)
            if request is None:
                continue
            n_tokens += len(delta.token_ids) // 4
            if delta.error is not None:
                self._fail(request, delta.error)
                outbox = None  # flushed: what comes next has to say anew when it arrived
                continue
            if request.outbox is not outbox:
                outbox = request.outbox
                outbox.arrived(arrived_s)
            outbox.add(delta)
            if delta.finish_reason is not None:
                ended.add(delta.request_id)
        for request_id in ended:
            if request_id not in self._pipeline:
                self._requests.remove(request_id, "completed")
        self._metrics.output_tokens.inc(n_tokens)

    def resume(self, keys: list[int], *, cause: str) -> None:
        """Place choices elsewhere, with what they have generated so far."""
        resumed = self._pipeline.resume(keys)
        self.deliver(resumed.deltas, time.monotonic())
        if resumed.submits:
            log.warning("choices_resubmitted", cause=cause, choices=len(resumed.submits))
            self._metrics.resubmitted.inc(len(resumed.submits))
        for submit in resumed.submits:
            request = self._requests.get(submit.request_id)
            if request is not None:
                request.spawn(self._place_again(request, submit))

    def abort(self, request_id: str, outcome: str = "aborted") -> None:
        """Forget a request, here and below. `outcome`: see RequestTable.remove."""
        request = self._requests.remove(request_id, outcome)
        if request is not None:
            request.outbox.forget(request_id)
        self._placement.end(self._pipeline.close(request_id), "abort")

    async def _place_again(self, request: Request, submit: Submit) -> None:
        assert request.card is not None  # it was placed before
        try:
            await self._placement.place([submit], request.card, request.cache_key)
        except Exception as error:
            self._fail(request, public_error(request.request_id, error))

    def _fail(self, request: Request, error: WireError) -> None:
        """A request is answered whole or not at all: its first failed choice ends the others."""
        request_id = request.request_id
        log.warning(
            "request_failed", request_id=request_id, status=error.status, error=error.message
        )
        request.outbox.flush()
        self.abort(request_id, outcome_of(error))
        request.outbox.send(Failed(request_id, error))

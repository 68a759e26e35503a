"""The tokenizer service: gateways above, schedulers below, text in between."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import structlog
from aiohttp import web

from pagemesh.shared.engine_messages import Lost, Tokens
from pagemesh.shared.errors import SHUTTING_DOWN, RequestError
from pagemesh.shared.ledger import LedgerCollector, outcome_of
from pagemesh.shared.link import LINK_PATH, Link, accept
from pagemesh.shared.messages import (
    CacheReset,
    Cancel,
    Detokenize,
    Engines,
    EngineStatus,
    Failed,
    Generate,
    ModelCard,
    Render,
    ResetCache,
    Tokenize,
)
from pagemesh.shared.metrics import EngineCollector
from pagemesh.shared.peers import Peers
from pagemesh.shared.registry import Load
from pagemesh.shared.service import Runtime
from pagemesh.shared.wire import Message
from pagemesh.tokenizer_svc.admission import Prepared
from pagemesh.tokenizer_svc.answers import Answers
from pagemesh.tokenizer_svc.delivery import Delivery
from pagemesh.tokenizer_svc.encoder_pool import EncoderPool
from pagemesh.tokenizer_svc.lookup import Lookup, LookupMetrics
from pagemesh.tokenizer_svc.metrics import TokenizerMetrics
from pagemesh.tokenizer_svc.outbox import Outbox
from pagemesh.tokenizer_svc.pipeline import Pipeline
from pagemesh.tokenizer_svc.placement import Placement
from pagemesh.tokenizer_svc.requests import Request, RequestTable, public_error
from pagemesh.tokenizer_svc.text_models import load_text_models

LOAD_PERIOD_S: Final = 0.5

log = structlog.get_logger(__name__)


class TokenizerService:
    """Serves the models of the settings. Raises StartupError when a folder cannot be read."""

    def __init__(self, runtime: Runtime) -> None:
        settings = runtime.settings
        text_models = load_text_models(settings)
        self._runtime = runtime
        self._text_models = text_models
        self._pipeline = Pipeline(text_models)
        lookup_metrics = LookupMetrics(runtime.metrics)
        self._lookup = Lookup(runtime.registry.prefix_index, lookup_metrics)
        self._placement = Placement(
            text_models,
            self._lookup,
            lookup_metrics,
            settings.gateway.request_timeout_s,
            self._push_engines,
        )
        self._requests = RequestTable()
        self._outboxes: set[Outbox] = set()
        self._pool = EncoderPool("encoder")
        self._answers = Answers(text_models.named, self._placement.known_card, self._refuse)
        self._draining = False
        runtime.metrics.register(EngineCollector(self._placement.statuses))
        self._metrics = TokenizerMetrics(
            runtime.metrics,
            in_flight=lambda: len(self._requests),
            waiting=lambda: self._pool.waiting + self._answers.waiting,
        )
        runtime.metrics.register(LedgerCollector(self._requests.ledger))
        self._delivery = Delivery(self._pipeline, self._placement, self._requests, self._metrics)

    @property
    def models(self) -> list[str]:
        """As the registry shows them."""
        return self._text_models.names

    def routes(self) -> list[web.RouteDef]:
        return [web.get(LINK_PATH, self._serve_gateway)]

    def not_ready(self) -> str | None:
        if self._draining:
            return "draining"
        return None if self._placement.statuses() else "no engine is known yet"

    def load(self) -> Load:
        return Load(self._requests.ledger().in_flight)

    async def run(self) -> None:
        runtime = self._runtime
        peers = Peers(
            "scheduler",
            runtime.registry,
            runtime.session,
            runtime.hello,
            self._serve_scheduler,
            runtime.metrics,
            runtime.link_tls,
        )
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(peers.run(), name="peers")
                group.create_task(self._report_load(), name="load")
        finally:
            await self._answers.close()
            await self._lookup.close()
            self._pool.close()

    async def drain(self) -> None:
        self._draining = True
        self._push_engines()
        try:
            await self._requests.idle.wait()
        finally:
            await self._let_gateways_go()

    async def _let_gateways_go(self) -> None:
        """What they still have here they ask of others."""
        outboxes = list(self._outboxes)
        for outbox in outboxes:
            outbox.flush()
        await asyncio.gather(*(outbox.link.close("shutting down") for outbox in outboxes))

    # -- gateways ---------------------------------------------------------------------------------

    async def _serve_gateway(self, request: web.Request) -> web.WebSocketResponse:
        link, socket = await accept(request, self._runtime.hello(self._statuses()))
        if link is None:
            return socket
        outbox = Outbox(link, self._metrics.token_s)
        self._outboxes.add(outbox)
        sender = asyncio.create_task(outbox.run(), name=f"outbox-{link.name}")
        self._send_engines(outbox)
        try:
            async for message in link:
                self._on_gateway(outbox, message)
        finally:
            self._outboxes.discard(outbox)
            self._answers.hang_up(outbox)
            for request_id in self._requests.of(outbox):
                self._delivery.abort(request_id)
            sender.cancel()
            outbox.flush()
            await asyncio.gather(sender, return_exceptions=True)  # it logs its own failure
            await link.close()
        return socket

    def _on_gateway(self, outbox: Outbox, message: Message) -> None:
        match message:
            case Generate():
                self._on_generate(outbox, message)
            case Cancel(request_id=request_id):
                request = self._requests.get(request_id)
                if request is not None and request.outbox is outbox:
                    self._delivery.abort(request_id)
                self._answers.cancel(outbox, request_id)
            case ResetCache(request_id, model):
                engines = self._placement.reset_cache(model)
                outbox.send(CacheReset(request_id, engines))
            case Tokenize() | Detokenize() | Render():
                self._answers.ask(outbox, message)
            case _:
                _warn_unexpected(outbox.link, message)

    def _on_generate(self, outbox: Outbox, generate: Generate) -> None:
        """A newer attempt replaces the older one, whose gateway link may not have ended yet."""
        request_id = generate.request_id
        older = self._requests.get(request_id)
        if older is not None and older.attempt >= generate.attempt:
            error = RequestError(f"request id {request_id!r} is in use", status=409)
            self._refuse(outbox, request_id, error)
            return
        if older is not None:
            self._delivery.abort(request_id)
        request = Request(request_id, generate.attempt, outbox, generate.cache_key)
        self._requests.add(request)
        request.spawn(self._admit(request, generate))

    async def _admit(self, request: Request, generate: Generate) -> None:
        structlog.contextvars.bind_contextvars(request_id=request.request_id)
        try:
            await self._admit_or_raise(request, generate)
        except Exception as error:
            outcome = self._refuse(request.outbox, request.request_id, error)
            self._delivery.abort(request.request_id, outcome)

    async def _admit_or_raise(self, request: Request, generate: Generate) -> None:
        arrived_s = time.monotonic()
        if self._draining:
            raise RequestError("this server is shutting down", status=503, code=SHUTTING_DOWN)
        self._text_models.named(generate.model)
        request.card = await self._placement.card(generate.model)
        prepared = await self._prepare(generate, request.card)
        admitted = self._pipeline.open(prepared)
        request.outbox.send(admitted.accepted)
        self._delivery.deliver(admitted.deltas, time.monotonic())
        engine = None
        if admitted.submits:
            place = await self._placement.place(admitted.submits, request.card, request.cache_key)
            engine = place.engine_id
            self._metrics.admit_s.observe(time.monotonic() - arrived_s)
        log.info(
            "request_admitted",
            request_id=request.request_id,
            prompt_tokens=len(admitted.prompt_ids) // 4,
            choices=prepared.params.n,
            engine=engine,
        )

    async def _prepare(self, generate: Generate, card: ModelCard) -> Prepared:
        started_s = time.perf_counter()
        prepared = await self._pool.run(self._pipeline.prepare, generate, card)
        self._metrics.encode_s.observe(time.perf_counter() - started_s)
        self._metrics.prompt_tokens.inc(len(prepared.prompt_ids) // 4)
        return prepared

    def _refuse(self, outbox: Outbox, request_id: str, error: Exception) -> str:
        """Answer what no engine has seen. Returns the outcome, for the ledger."""
        refusal = public_error(request_id, error)
        self._metrics.refused.labels(str(refusal.status)).inc()
        log.info("request_refused", request_id=request_id, status=refusal.status)
        outbox.send(Failed(request_id, refusal))
        return outcome_of(refusal)

    def _push_engines(self) -> None:
        for outbox in self._outboxes:
            self._send_engines(outbox)

    async def _report_load(self) -> None:
        """Until cancelled. Gateways only show it; every service tells each of them of all engines,
        so each report of a scheduler passed on at once would be most of what a large mesh does."""
        told: list[EngineStatus] = []
        while True:
            await asyncio.sleep(LOAD_PERIOD_S)
            if (statuses := self._placement.statuses()) != told:
                told = statuses
                self._push_engines()

    def _send_engines(self, outbox: Outbox) -> None:
        names = self._text_models.names
        outbox.send(Engines(self._statuses(), draining=self._draining, names=names))

    def _statuses(self) -> list[EngineStatus]:
        """Those of the engines; what is of their models' text is ours to say."""
        return [
            status._replace(
                card=status.card._replace(parsers=self._text_models.of(status.card).parsers)
            )
            for status in self._placement.statuses()
        ]

    # -- schedulers -------------------------------------------------------------------------------

    async def _serve_scheduler(self, link: Link) -> None:
        self._placement.link_up(link)
        try:
            async for message in link:
                await self._on_scheduler(link, message)
        except Exception:
            # A frame that makes no sense: whatever that scheduler holds is safer elsewhere.
            log.exception("scheduler_frame_failed", peer=link.name)
        finally:
            self._delivery.resume(self._placement.link_down(link), cause="scheduler_link_lost")

    async def _on_scheduler(self, link: Link, message: Message) -> None:
        match message:
            case Tokens():
                await self._delivery.take(message)
            case Engines():
                self._placement.update(link, message)
            case Lost():
                self._delivery.resume(self._placement.lost(link, message), cause="engine_lost")
            case _:
                _warn_unexpected(link, message)


def _warn_unexpected(link: Link, message: Message) -> None:
    log.warning("unexpected_message", peer=link.name, kind=type(message).__name__)

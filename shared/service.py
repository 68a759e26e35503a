"""The shell every service runs in: one HTTP port, health, metrics, registry, signals, draining.

A service brings a `ServiceCore`; `serve` gives it a `Runtime`, listens, announces the instance and
stops in order: withdraw from the registry, drain, cancel, close.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import ssl
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp
import structlog
from aiohttp import web
from aiohttp.typedefs import Middleware
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from pagemesh.shared.errors import StartupError
from pagemesh.shared.loop_lag import LoopLag
from pagemesh.shared.messages import EngineStatus, Hello
from pagemesh.shared.registry import Instance, Load, Registry, masked_url
from pagemesh.shared.server_log import ServerLog
from pagemesh.shared.settings import Settings
from pagemesh.shared.shared_port import BACKLOG, shared_socket, take_connections
from pagemesh.shared.tls import dialling_context
from pagemesh.shared.wire import PROTOCOL

log = structlog.get_logger(__name__)
_WILDCARDS = ("0.0.0.0", "[::]")
LAST_HANDLERS_S = 1.0
GC_THRESHOLDS = (10_000, 10, 10)
METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Runtime:
    """What the shell gives a service: identity, settings, registry, client session, metrics.

    Raises StartupError when the TLS files of the links will not do.
    """

    def __init__(
        self, service: str, settings: Settings, registry: Registry, session: aiohttp.ClientSession
    ) -> None:
        self.service = service
        self.settings = settings
        self.registry = registry
        self.session = session
        self.link_tls = dialling_context(settings.mesh)
        self.metrics = CollectorRegistry()
        redis_up = Gauge("pagemesh_redis_up", "Whether Redis answers", registry=self.metrics)
        redis_up.set_function(lambda: float(not registry.away))
        self.connections: Callable[[], Iterable[object]] = tuple
        """Those that are open now, as `request.protocol` has them."""
        self.loop_lag = LoopLag(self.metrics)
        self.epoch = time.time_ns()
        self.instance_id = f"{service}-{uuid.uuid4().hex[:8]}"

    def hello(self, engines: list[EngineStatus] | None = None) -> Hello:
        secret = self.settings.mesh.mesh_secret
        return Hello(PROTOCOL, self.service, self.instance_id, self.epoch, secret, engines or [])


class ServiceCore(Protocol):
    """What a service implements. Everything runs on the one event loop of the process.

    A core may also have `middlewares`: they surround those that `serve` is given; and `models`, the
    names of the models it serves, for the registry.
    """

    def routes(self) -> list[web.RouteDef]:
        """HTTP routes beside /health, /ready and /metrics, the link endpoint included."""

    def not_ready(self) -> str | None:
        """Why the service cannot do its work now, or None when it can."""

    def load(self) -> Load:
        """What it has to do now, for the registry."""

    async def run(self) -> None:
        """Work until cancelled. An exception ends the process."""

    async def drain(self) -> None:
        """Take nothing new and return when nothing is in flight. When it is cancelled, because that
        takes too long: let others have what is left, at once."""


BuildService = Callable[[Runtime], ServiceCore]


async def serve(
    service: str,
    settings: Settings,
    build: BuildService,
    *,
    host: str,
    port: int,
    shared_port: int | None = None,
    tls: ssl.SSLContext | None = None,
    middlewares: Sequence[Middleware] = (),
) -> None:
    """Run one service until SIGTERM or SIGINT.

    It is announced at `port` (0: a free one). With a `shared_port` it takes connections there too,
    beside other processes, while it can serve them. Raises StartupError when a port is busy or
    Redis cannot be reached.
    """
    async with AsyncExitStack() as stack:
        registry = await _open_registry(settings, stack)
        session = await stack.enter_async_context(_client_session())
        runtime = Runtime(service, settings, registry, session)
        core = build(runtime)
        runner = web.AppRunner(
            service_app(core, runtime, middlewares),
            handler_cancellation=True,
            access_log=None,
            logger=ServerLog(),
            # Some kilobytes may hold 32 MiB, which would be unpacked on the loop before any key is
            # looked at.
            auto_decompress=False,
            # After the drain only links and lost clients are left; they need no patience.
            shutdown_timeout=LAST_HANDLERS_S,
        )
        await runner.setup()
        runtime.connections = partial(_connections, runner)
        stack.push_async_callback(runner.cleanup)
        sharing = stack.enter_context(_shared(host, shared_port)) if shared_port else None
        address = await _listen(runner, host, port, tls)
        announced = _announced(address, settings.mesh.redis_url or "")
        instance = Instance(
            service,
            runtime.instance_id,
            announced,
            runtime.epoch,
            models=getattr(core, "models", []),
        )
        log.info("listening", service=service, address=address, instance=runtime.instance_id)
        offers = [runtime.registry.announce(instance, core.load)]
        if sharing is not None:
            offers.append(take_connections(runner, sharing, tls, core.not_ready))
        await _run_until_signal(core, runtime, instance, offers)


def _client_session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=2.0)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))


async def _open_registry(settings: Settings, stack: AsyncExitStack) -> Registry:
    url = settings.mesh.redis_url
    if url is None:
        raise StartupError(
            "a service alone needs a registry: set --redis-url redis://HOST:PORT "
            "(pagemesh serve brings its own)"
        )
    registry = Registry(url, settings.mesh.mesh_name)
    stack.push_async_callback(registry.close)
    try:
        await registry.ping()
    except Exception as error:
        reason = str(error) or "no answer in time"
        raise StartupError(f"cannot reach Redis at {masked_url(url)}: {reason}") from error
    return registry


def service_app(
    core: ServiceCore, runtime: Runtime, middlewares: Sequence[Middleware]
) -> web.Application:
    """The routes of the core and those that every service has."""

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"status": "alive"})

    async def ready(_: web.Request) -> web.Response:
        reason = core.not_ready()
        body = {"status": "ready"} if reason is None else {"status": "not ready", "reason": reason}
        return web.json_response(body, status=200 if reason is None else 503)

    async def metrics(request: web.Request) -> web.Response:
        """All series, or those of the families called `name[]`, as Prometheus' clients ask."""
        names = request.query.getall("name[]", [])
        chosen = runtime.metrics.restricted_registry(names) if names else runtime.metrics
        body = generate_latest(chosen)
        return web.Response(body=body, headers={"Content-Type": METRICS_CONTENT_TYPE})

    limit = runtime.settings.gateway.max_body_bytes
    around = (*getattr(core, "middlewares", ()), *middlewares)
    app = web.Application(client_max_size=limit, middlewares=around)
    for path, handler in (("/health", health), ("/ready", ready), ("/metrics", metrics)):
        app.router.add_get(path, handler)
        app.router.add_get(f"{path}/", handler)
    app.add_routes(core.routes())
    return app


async def _listen(runner: web.AppRunner, host: str, port: int, tls: ssl.SSLContext | None) -> str:
    site = web.TCPSite(runner, host, port, ssl_context=tls, backlog=BACKLOG)
    try:
        await site.start()
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    bound_host, bound_port = runner.addresses[0][:2]
    shown = f"[{bound_host}]" if ":" in bound_host else bound_host
    return f"{shown}:{bound_port}"


def _connections(runner: web.AppRunner) -> list[web.RequestHandler]:
    return [] if runner.server is None else runner.server.connections


def _shared(host: str, port: int) -> socket.socket:
    try:
        return shared_socket(host, port)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> StartupError:
    # asyncio words its own sentence around the errno; name resolution has no errno.
    unknown_host = isinstance(error, socket.gaierror)
    reason = error.strerror if unknown_host else os.strerror(error.errno or 0)
    return StartupError(
        f"cannot listen on {host}:{port}: {reason}; choose another port or stop what uses it"
    )


def _announced(address: str, redis_url: str) -> str:
    """`address` as peers reach it: a wildcard becomes the address this host shows to Redis."""
    host, port = address.rsplit(":", 1)
    if host not in _WILDCARDS:
        return address
    redis = urlsplit(redis_url)
    family = socket.AF_INET6 if host == "[::]" else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; it only picks the route.
        probe.connect((redis.hostname or "localhost", redis.port or 6379))
        own = probe.getsockname()[0]
    return f"[{own}]:{port}" if ":" in own else f"{own}:{port}"


async def _run_until_signal(
    core: ServiceCore,
    runtime: Runtime,
    instance: Instance,
    offers: Iterable[Coroutine[Any, Any, None]],
) -> None:
    """`offers` bring newcomers, until they are cancelled."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stopped.set)
    work = asyncio.create_task(core.run(), name=f"{runtime.service}-run")
    lag = asyncio.create_task(runtime.loop_lag.run(), name="loop-lag")
    offering = [asyncio.create_task(offer, name="offer") for offer in offers]
    stop = asyncio.create_task(stopped.wait(), name="signal")
    # A full collection over a grown heap takes tens of milliseconds; what exists now stays.
    gc.collect()
    gc.freeze()
    # A request makes some hundred objects and leaves none behind that only a collection finds.
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        done, _ = await asyncio.wait({work, *offering, stop}, return_when=asyncio.FIRST_COMPLETED)
        if stop in done:
            await _withdraw_and_drain(core, runtime, instance, offering)
        for task in done:
            task.result()
    finally:
        ours = (work, lag, *offering, stop)
        for task in ours:
            task.cancel()
        await asyncio.gather(*ours, return_exceptions=True)


async def _withdraw_and_drain(
    core: ServiceCore,
    runtime: Runtime,
    instance: Instance,
    offering: Iterable[asyncio.Task[None]],
) -> None:
    for offer in offering:
        offer.cancel()
    log.info("draining", timeout_s=runtime.settings.mesh.drain_timeout_s)
    await runtime.registry.withdraw(instance)
    try:
        await asyncio.wait_for(core.drain(), timeout=runtime.settings.mesh.drain_timeout_s)
    except TimeoutError:
        log.warning("drain_cut_short", effect="what still runs goes on elsewhere")

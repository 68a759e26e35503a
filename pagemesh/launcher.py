"""`pagemesh serve`: the whole mesh on one machine, as child processes of this one."""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

import aiohttp
import structlog
import uvloop
from msgspec.structs import replace
from redis.exceptions import RedisError

from pagemesh.banner import banner, gateway_url
from pagemesh.children import line_writer, service_spec
from pagemesh.embedded_valkey import embedded_valkey
from pagemesh.idle_gpus import idle_gpus
from pagemesh.shared.errors import SettingsError, StartupError
from pagemesh.shared.logs import is_human
from pagemesh.shared.prepared import load_prepared, prepared_folder
from pagemesh.shared.registry import Registry
from pagemesh.shared.settings import Settings
from pagemesh.supervisor import ChildFailed, ChildSpec, Supervisor, describe_exit, first, guarded

# In the order they start; they stop the other way round.
SERVICES: Final = ("worker", "scheduler", "tokenizer", "gateway")
EXIT_FAILED: Final = 1
# As a shell counts: what a signal ended has this plus the signal's number.
EXIT_SIGNAL: Final = 128
REGISTRY_TIMEOUT_S: Final = 10.0
STOP_GRACE_S: Final = 3.0
_POLL_S: Final = 0.05
_WAITING_LOG_S: Final = 10.0

T = TypeVar("T")
log = structlog.get_logger(__name__)


def serve_mesh(settings: Settings) -> int:
    """Serve until a signal; the exit code. Raises StartupError when the mesh cannot start."""
    try:
        exit_code: int = uvloop.run(_serve(settings))
    except ChildFailed as error:
        print(f"pagemesh: error: {error}", file=sys.stderr)
        return EXIT_FAILED
    return exit_code


async def _serve(settings: Settings) -> int:
    settings = _complete(settings)
    with _Stops() as stops:
        exit_code = await _until_stop(_prepare(settings), stops.first)
        if exit_code != 0:
            return exit_code or 0
        with _registry(settings) as (settings, valkey):
            supervisor = Supervisor(line_writer(settings))
            try:
                await _until_stop(_run_mesh(supervisor, settings, valkey), stops.first)
            finally:
                await _stop(supervisor, settings, stops)
    return 0


class _Stops:
    """The first SIGINT, SIGTERM or SIGHUP asks for an orderly stop, the second for a quick one."""

    _SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def __enter__(self) -> _Stops:
        for signum in self._SIGNALS:
            asyncio.get_running_loop().add_signal_handler(signum, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for signum in self._SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(signum)

    def _on_signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def _until_stop(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """The result of `work`; None when the stop came first, which cancels it."""
    working = asyncio.create_task(work)
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not working.done():
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        return None
    return working.result()


def _complete(settings: Settings) -> Settings:
    """Decide what the children must agree on: the port, the mesh secret, how lines look.

    Raises StartupError when the port is busy, SettingsError for one port of several services.
    """
    if settings.mesh.service_port != 0:
        raise SettingsError(
            f"pagemesh serve cannot give --service-port {settings.mesh.service_port} to each of "
            "its services: leave it at 0, which takes free ports",
            key="service_port",
        )
    port = _free_port(settings.gateway.host, settings.gateway.port)
    mesh = replace(settings.mesh, mesh_secret=settings.mesh.mesh_secret or secrets.token_hex(32))
    log_format = "human" if is_human(settings.log) else "json"
    return replace(
        settings,
        gateway=replace(settings.gateway, port=port),
        mesh=mesh,
        log=replace(settings.log, log_format=log_format),
    )


def _free_port(host: str, port: int) -> int:
    """`port` if it can be listened on (0: a free one). Raises StartupError when it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            # Binding alone succeeds beside a listener that allows reuse.
            probe.listen()
        except OSError as error:
            raise StartupError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another address with "
                "--host and --port, or stop what uses it"
            ) from error
        return int(probe.getsockname()[1])


async def _prepare(settings: Settings) -> int:
    """Prepare the model in a process of its own, which hands its memory back; its exit code.

    It shares our terminal, for its progress bar, and says itself what went wrong, unless a signal
    ended it.
    """
    spec = service_spec("prepare", settings)
    process = await asyncio.create_subprocess_exec(
        *guarded(spec.command), env=dict(spec.environ), stdout=asyncio.subprocess.DEVNULL
    )
    try:
        exit_code = await process.wait()
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        raise
    if exit_code >= 0:
        return exit_code
    log.error("prepare_ended", ended=describe_exit(exit_code))
    return EXIT_SIGNAL - exit_code


@contextmanager
def _registry(settings: Settings) -> Iterator[tuple[Settings, ChildSpec | None]]:
    """The settings with a registry in them, and the Valkey to start when none was given."""
    if settings.mesh.redis_url is not None:
        yield settings, None
        return
    with embedded_valkey() as valkey:
        mesh = replace(settings.mesh, redis_url=valkey.url)
        yield replace(settings, mesh=mesh), valkey.spec


async def _run_mesh(supervisor: Supervisor, settings: Settings, valkey: ChildSpec | None) -> None:
    """Start everything, say when it is ready, and watch it until cancelled."""
    if valkey is not None:
        supervisor.start(valkey)
        await first(supervisor.watch(), _wait_for_registry(settings))
    for service in SERVICES:
        supervisor.start(service_spec(service, settings))
    await first(supervisor.watch(), _wait_until_ready(settings))
    supervisor.mark_ready()
    print(banner(settings, _model_name(settings)), flush=True)
    hint = await idle_gpus(settings)
    if hint is not None:
        print(f"{hint}\n", flush=True)
    await supervisor.watch()


async def _wait_for_registry(settings: Settings) -> None:
    """Raises StartupError when Valkey does not answer in time."""
    assert settings.mesh.redis_url is not None
    registry = Registry(settings.mesh.redis_url, settings.mesh.mesh_name)
    try:
        async with asyncio.timeout(REGISTRY_TIMEOUT_S):
            await _until_answer(registry)
    except TimeoutError as error:
        raise StartupError(
            f"the embedded Valkey did not answer within {REGISTRY_TIMEOUT_S:.0f} s"
        ) from error
    finally:
        await registry.close()


async def _until_answer(registry: Registry) -> None:
    while True:
        try:
            return await registry.ping()
        except (RedisError, OSError):
            await asyncio.sleep(_POLL_S)


async def _wait_until_ready(settings: Settings) -> None:
    """Ask the gateway until it is ready; now and then say what is missing."""
    loop = asyncio.get_running_loop()
    next_log_s = loop.time() + _WAITING_LOG_S
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session:
        while (reason := await _not_ready(session, settings)) is not None:
            if loop.time() > next_log_s:
                next_log_s += _WAITING_LOG_S
                log.info("waiting_for_mesh", reason=reason)
            await asyncio.sleep(_POLL_S)


async def _not_ready(session: aiohttp.ClientSession, settings: Settings) -> str | None:
    try:
        # Our own process, maybe under a self-signed certificate: nothing to verify.
        async with session.get(f"{gateway_url(settings.gateway)}/ready", ssl=False) as answer:
            if answer.status == 200:
                return None
            reason: str = (await answer.json())["reason"]
            return reason
    except (OSError, aiohttp.ClientError, TimeoutError) as error:
        return f"the gateway does not answer yet: {error}"


async def _stop(supervisor: Supervisor, settings: Settings, stops: _Stops) -> None:
    """In order and with patience; at once when a second signal comes."""
    log.info("stopping", again="once more to stop at once")
    grace_s = settings.mesh.drain_timeout_s + STOP_GRACE_S
    stopping = asyncio.create_task(supervisor.stop(grace_s))
    hurry = asyncio.create_task(stops.second.wait())
    await asyncio.wait({stopping, hurry}, return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        supervisor.kill()
    hurry.cancel()
    await stopping


def _model_name(settings: Settings) -> str:
    if settings.model.served_model_name:
        return settings.model.served_model_name[0]
    return load_prepared(prepared_folder(settings.model)).name

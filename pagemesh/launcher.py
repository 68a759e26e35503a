"""`pagemesh serve`: the whole mesh on one machine, as child processes of this one."""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

import structlog
import uvloop
from msgspec.structs import replace

from pagemesh.autoscale import (
    Autoscaler,
    Bounds,
    autoscale,
    bounds_of,
    check_cores,
    with_most_workers,
    with_workers,
)
from pagemesh.banner import banner
from pagemesh.children import SERVICES, line_writer, service_spec, service_specs
from pagemesh.embedded_valkey import (
    EmbeddedValkey,
    embedded_valkey,
    keeping_what_it_can,
    kept_folder,
)
from pagemesh.gateway_port import free_port, held_port
from pagemesh.idle_gpus import idle_gpus
from pagemesh.readiness import wait_for_registry, wait_until_ready
from pagemesh.shared.errors import SettingsError, StartupError
from pagemesh.shared.logs import is_human
from pagemesh.shared.model_list import listed_models, n_workers
from pagemesh.shared.prepared import served_names
from pagemesh.shared.settings import Settings
from pagemesh.supervisor import ChildFailed, Supervisor, describe_exit, first, guarded
from pagemesh.worker_devices import worker_devices

EXIT_FAILED: Final = 1
# As a shell counts: what a signal ended has this plus the signal's number.
EXIT_SIGNAL: Final = 128
STOP_GRACE_S: Final = 3.0

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
    bounds = bounds_of(settings)
    settings = _complete(with_most_workers(settings, bounds))
    devices = await worker_devices(settings)
    check_cores(bounds, devices)
    with _Stops() as stops, held_port(settings):
        exit_code = await _until_stop(_prepare(settings), stops.first)
        if exit_code != 0:
            return exit_code or 0
        with _registry(settings) as (settings, valkey):
            supervisor = Supervisor(line_writer(settings))
            try:
                running = _run_mesh(supervisor, settings, valkey, devices, bounds)
                async with keeping_what_it_can(valkey):
                    await _until_stop(running, stops.first)
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
    port = free_port(settings.gateway)
    mesh = replace(settings.mesh, mesh_secret=settings.mesh.mesh_secret or secrets.token_hex(32))
    log_format = "human" if is_human(settings.log) else "json"
    return replace(
        settings,
        gateway=replace(settings.gateway, port=port),
        mesh=mesh,
        log=replace(settings.log, log_format=log_format),
    )


async def _prepare(settings: Settings) -> int:
    """Prepare the models in a process of its own, which hands its memory back; its exit code.

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
def _registry(settings: Settings) -> Iterator[tuple[Settings, EmbeddedValkey | None]]:
    """The settings with a registry in them, and the Valkey to start when none was given."""
    if settings.mesh.redis_url is not None:
        yield settings, None
        return
    with embedded_valkey(kept_folder(settings.mesh)) as valkey:
        mesh = replace(settings.mesh, redis_url=valkey.url)
        yield replace(settings, mesh=mesh), valkey


async def _run_mesh(
    supervisor: Supervisor,
    settings: Settings,
    valkey: EmbeddedValkey | None,
    devices: list[str],
    bounds: Bounds | None,
) -> None:
    """Start everything, say when it is ready, and watch it until cancelled."""
    if valkey is not None:
        await _start_registry(supervisor, settings, valkey)
    workers = service_specs("worker", settings, devices)
    at_first = settings if bounds is None else with_workers(settings, bounds.low)
    group = supervisor.start(*workers[: n_workers(at_first)])
    for service in SERVICES[1:]:
        supervisor.start(*service_specs(service, settings))
    await first(supervisor.watch(), wait_until_ready(at_first))
    supervisor.mark_ready()
    print(banner(settings, _model_names(settings)), flush=True)
    if bounds is not None:
        scaler = Autoscaler(supervisor, group, workers, bounds, _grace_s(settings))
        await first(supervisor.watch(), autoscale(scaler, settings))
    hint = await idle_gpus(settings)
    if hint is not None:
        print(f"{hint}\n", flush=True)
    await supervisor.watch()


async def _start_registry(
    supervisor: Supervisor, settings: Settings, valkey: EmbeddedValkey
) -> None:
    """Raises StartupError, which names what it keeps: the disk may be full, or a file damaged."""
    supervisor.start(valkey.spec)
    try:
        await first(supervisor.watch(), wait_for_registry(settings))
    except ChildFailed as failed:
        if valkey.kept is None:
            raise
        said = next(filter(None, reversed(failed.tail)), describe_exit(failed.exit_code))
        raise StartupError(
            f"the embedded Valkey cannot start with what it keeps in {valkey.kept} ({said}): "
            "make room, move the folder away, or give another --data-dir"
        ) from failed


async def _stop(supervisor: Supervisor, settings: Settings, stops: _Stops) -> None:
    """In order and with patience; at once when a second signal comes."""
    log.info("stopping", again="once more to stop at once")
    stopping = asyncio.create_task(supervisor.stop(_grace_s(settings)))
    hurry = asyncio.create_task(stops.second.wait())
    await asyncio.wait({stopping, hurry}, return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        supervisor.kill()
    hurry.cancel()
    await stopping


def _grace_s(settings: Settings) -> float:
    return settings.mesh.drain_timeout_s + STOP_GRACE_S


def _model_names(settings: Settings) -> list[str]:
    return [served_names(model)[0] for model in listed_models(settings.model)]

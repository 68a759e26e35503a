"""Run one service in this process. Each import is lazy: a service loads only what it needs."""

from __future__ import annotations

import ssl
from importlib import import_module
from typing import Final, NamedTuple

import uvloop
from aiohttp.typedefs import Middleware

from pagemesh.shared.access import guarding, link_access
from pagemesh.shared.errors import SettingsError, StartupError
from pagemesh.shared.model_list import of_one_model
from pagemesh.shared.service import BuildService, serve
from pagemesh.shared.settings import Settings, check_link_exposure
from pagemesh.shared.tls import client_facing_context, listening_context
from pagemesh.shared.watchdog import watched

_INNER: Final = {
    "tokenizer": ("pagemesh.tokenizer_svc.service", "TokenizerService"),
    "scheduler": ("pagemesh.scheduler_svc.service", "SchedulerService"),
    "worker": ("pagemesh.worker_svc.service", "WorkerService"),
}


class Parts(NamedTuple):
    """What the shell runs: the core of a service, and what surrounds each of its routes beside the
    core's own."""

    build: BuildService
    middlewares: list[Middleware]


def service_parts(service: str, settings: Settings) -> Parts:
    if service == "gateway":
        from pagemesh.gateway.service import GatewayService

        return Parts(GatewayService, [])
    module, name = _INNER[service]
    build: BuildService = getattr(import_module(module), name)
    return Parts(build, [guarding(link_access(settings.gateway))])


def run_service(service: str, settings: Settings) -> None:
    """Run until SIGTERM or SIGINT. Raises StartupError when the service cannot start."""
    try:
        if service == "gateway":
            _run_gateway(settings)
        else:
            _run_inner(service, settings)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("pagemesh"):
            raise
        raise StartupError(
            f"the {service} service needs the package {error.name}, which is not installed: "
            f"pip install 'pagemesh[{service}]'"
        ) from error


def _run_gateway(settings: Settings) -> None:
    gateway = settings.gateway
    port, shared_port = _gateway_ports(settings)
    _run(
        "gateway",
        settings,
        address=(gateway.host, port),
        shared_port=shared_port,
        tls=client_facing_context(gateway),
    )


def _gateway_ports(settings: Settings) -> tuple[int, int | None]:
    """Its own port, and the one it shares with other gateways. Raises SettingsError."""
    n_gateways, port = settings.mesh.gateways, settings.gateway.port
    if n_gateways == 1:
        return port, None
    if port == 0:
        raise SettingsError(
            f"--gateways {n_gateways} share one port, so --port 0, which takes any free one, "
            "will not do",
            key="port",
        )
    return settings.mesh.service_port, port


def _run_inner(service: str, settings: Settings) -> None:
    check_link_exposure(settings.mesh)
    if service == "worker":
        settings = of_one_model(settings)
    _run(
        service,
        settings,
        address=(settings.mesh.service_host, settings.mesh.service_port),
        tls=listening_context(settings.mesh),
    )


def _run(
    service: str,
    settings: Settings,
    *,
    address: tuple[str, int],
    shared_port: int | None = None,
    tls: ssl.SSLContext | None = None,
) -> None:
    host, port = address
    parts = service_parts(service, settings)
    running = serve(
        service,
        settings,
        parts.build,
        host=host,
        port=port,
        shared_port=shared_port,
        tls=tls,
        middlewares=parts.middlewares,
    )
    uvloop.run(watched(running, settings.mesh.loop_timeout_s))

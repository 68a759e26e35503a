"""The port of the gateways: free when the mesh starts, and its own until it ends."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from pagemesh.shared.errors import StartupError
from pagemesh.shared.settings import GatewaySettings, Settings
from pagemesh.shared.shared_port import family_of, shared_socket


def free_port(gateway: GatewaySettings) -> int:
    """The port of the settings if it can be listened on (0: a free one).

    Raises StartupError when it cannot, be it that the gateways of another mesh share it.
    """
    with socket.socket(family_of(gateway.host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((gateway.host, gateway.port))
            # Binding alone succeeds beside a listener that allows reuse.
            probe.listen()
        except OSError as error:
            raise _not_free(gateway, error) from error
        return int(probe.getsockname()[1])


@contextmanager
def held_port(settings: Settings) -> Iterator[None]:
    """Keep the port from others while the block runs, if several gateways share it.

    They leave it open to whoever shares ports, and it is nobody's while a model is prepared. Raises
    StartupError when somebody was quicker.
    """
    gateway = settings.gateway
    if settings.mesh.gateways == 1:
        yield
        return
    try:
        holder = shared_socket(gateway.host, gateway.port)
    except OSError as error:
        raise _not_free(gateway, error) from error
    with holder:
        # From here on `free_port` of another mesh fails, though nobody may listen yet.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        yield


def _not_free(gateway: GatewaySettings, error: OSError) -> StartupError:
    return StartupError(
        f"cannot listen on {gateway.host}:{gateway.port}: {error.strerror}; choose another address "
        "with --host and --port, or stop what uses it"
    )

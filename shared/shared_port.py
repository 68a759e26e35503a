"""A port that several processes of one machine listen on: the kernel deals out the connections.

Each process has a socket of its own (SO_REUSEPORT), and a connection belongs to one of them until
it ends. Only sockets that listen get any.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from aiohttp import web

BACKLOG: Final = 1024
_POLL_S: Final = 0.05


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def shared_socket(host: str, port: int) -> socket.socket:
    """Bound beside the others that share the port, and not listening yet.

    Raises OSError where somebody has the port who does not share it.
    """
    family = family_of(host)
    sharing = socket.socket(family)
    try:
        sharing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sharing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            # As asyncio binds a port that is not shared.
            sharing.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sharing.bind((host, port))
    except BaseException:
        sharing.close()
        raise
    return sharing


async def take_connections(
    runner: web.AppRunner,
    sharing: socket.socket,
    tls: ssl.SSLContext | None,
    not_ready: Callable[[], str | None],
) -> None:
    """Listen from the moment that nothing is `not_ready` until cancelled.

    The kernel would send a share of the clients to a process that cannot answer yet, or any more,
    while others can.
    """
    while not_ready() is not None:  # noqa: ASYNC110 -- not_ready tells no changes
        await asyncio.sleep(_POLL_S)
    # The event loop closes its descriptor when it stops taking; the socket listens until this one
    # is closed too.
    with sharing.dup() as ours:
        site = web.SockSite(runner, sharing, ssl_context=tls, backlog=BACKLOG)
        try:
            await site.start()
            await asyncio.get_running_loop().create_future()
        finally:
            await site.stop()
            waiting = _accepted_last(ours)
            await asyncio.gather(*(_serve(runner, each, tls) for each in waiting))


def _accepted_last(listening: socket.socket) -> list[socket.socket]:
    """Close `listening`; the connections that waited to be taken. The kernel gave them to us, and
    resets what comes between the last look and the end, so nothing stands between these."""
    waiting = []
    with listening, suppress(BlockingIOError):
        while True:
            waiting.append(listening.accept()[0])
    for connection in waiting:
        connection.setblocking(False)
    return waiting


async def _serve(
    runner: web.AppRunner, connection: socket.socket, tls: ssl.SSLContext | None
) -> None:
    assert runner.server is not None
    loop = asyncio.get_running_loop()
    with suppress(OSError):  # its client has gone meanwhile
        await loop.connect_accepted_socket(runner.server, connection, ssl=tls)

"""A port that several processes of one machine listen on: the kernel deals out the connections.

Each process has a socket of its own (SO_REUSEPORT), and a connection belongs to one of them until
it ends. Only sockets that listen get any.
"""

from __future__ import annotations

import asyncio
import ctypes
import socket
import ssl
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from aiohttp import web

BACKLOG: Final = 1024
_POLL_S: Final = 0.05
# For handshakes that have begun when a socket is about to close.
_HANDSHAKE_S: Final = 0.005
# Of Linux; Python's socket module does not name it.
_SO_ATTACH_FILTER: Final = 26
_INSTRUCTION_BYTES: Final = 8
# Instructions of the classic BPF, over the TCP header: code, jump if true, if false, operand.
_NO_SYN: Final = b"".join(
    struct.pack("HBBI", *instruction)
    for instruction in (
        (0x30, 0, 0, 13),  # load the byte of the flags
        (0x45, 0, 1, 0x02),  # is SYN among them?
        (0x06, 0, 0, 0),  # drop the packet
        (0x06, 0, 0, 0xFFFFFFFF),  # let it pass
    )
)


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
            let_nobody_new_in(ours)
            await asyncio.sleep(_HANDSHAKE_S)
            waiting = _accepted_last(ours)
            await asyncio.gather(*(_serve(runner, each, tls) for each in waiting))


def _accepted_last(listening: socket.socket) -> list[socket.socket]:
    """Close `listening`; the connections that waited to be taken. The kernel gave them to us, and
    would reset them."""
    waiting = []
    with listening, suppress(BlockingIOError):
        while True:
            waiting.append(listening.accept()[0])
    for connection in waiting:
        connection.setblocking(False)
    return waiting


def let_nobody_new_in(listening: socket.socket) -> None:
    """The kernel drops every SYN for it from now on (socket(7), SO_ATTACH_FILTER): who connects
    tries again after a second, when others have the port. Handshakes that have begun go on."""
    if sys.platform != "linux":
        return
    code = ctypes.create_string_buffer(_NO_SYN)
    program = struct.pack("HP", len(_NO_SYN) // _INSTRUCTION_BYTES, ctypes.addressof(code))
    with suppress(OSError):  # some sandboxes have no filters; there a connection may be reset
        listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


async def _serve(
    runner: web.AppRunner, connection: socket.socket, tls: ssl.SSLContext | None
) -> None:
    assert runner.server is not None
    loop = asyncio.get_running_loop()
    with suppress(OSError):  # its client has gone meanwhile
        await loop.connect_accepted_socket(runner.server, connection, ssl=tls)

"""A port of several sockets, left under load."""

from __future__ import annotations

import asyncio
import select
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

import pytest
import uvloop
from aiohttp import web

from pagemesh.shared.shared_port import let_nobody_new_in, shared_socket, take_connections

HOST: Final = "127.0.0.1"
REQUEST: Final = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
N_CLIENTS: Final = 4
N_LEAVINGS: Final = 15


@asynccontextmanager
async def taking(port: int) -> AsyncIterator[int]:
    """A server that takes its part of the port's connections until the block ends, and answers
    those that it has by then. Yields the port."""

    async def hello(_: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_get("/", hello)
    runner = web.AppRunner(app)
    await runner.setup()
    with shared_socket(HOST, port) as sharing:
        task = asyncio.create_task(take_connections(runner, sharing, None, lambda: None))
        while not sharing.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        try:
            yield port_of(sharing)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    # Each connection is answered once; then nothing is left to wait for.
    async with asyncio.timeout(10):
        while runner.server is not None and runner.server.connections:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await runner.cleanup()


class Clients:
    """Threads that ask without a pause, each time over a connection of its own."""

    def __init__(self, port: int) -> None:
        self.n_answered = 0
        self.faults: list[str] = []
        self._port = port
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(N_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        while not self._over.is_set():
            try:
                with socket.create_connection((HOST, self._port), timeout=10) as connection:
                    connection.sendall(REQUEST)
                    answer = connection.recv(4096)
                assert answer.startswith(b"HTTP/1.1 200"), answer
                self.n_answered += 1
            except (OSError, AssertionError) as error:
                self.faults.append(repr(error))


def test_who_leaves_the_port_resets_nobody() -> None:
    """On the event loop of the services: asyncio's own forgets what it has just accepted."""

    async def come_and_go() -> Clients:
        async with taking(0) as port:
            clients = Clients(port)
            try:
                for _ in range(N_LEAVINGS):
                    async with taking(port):
                        await asyncio.sleep(0.05)
            finally:
                await asyncio.to_thread(clients.stop)
        return clients

    clients = uvloop.run(come_and_go())
    assert clients.faults == []
    assert clients.n_answered > N_LEAVINGS


@pytest.mark.skipif(sys.platform != "linux", reason="others have no such filter")
def test_who_connects_to_a_closing_socket_reaches_another() -> None:
    with shared_socket(HOST, 0) as leaving, shared_socket(HOST, port_of(leaving)) as staying:
        leaving.listen()
        let_nobody_new_in(leaving)
        with socket.socket() as client:
            client.setblocking(False)
            with suppress(BlockingIOError):
                client.connect((HOST, port_of(leaving)))
            assert not is_connected(client, 0.2)
            staying.listen()
            leaving.close()
            assert is_connected(client, 10)
            assert client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
            staying.accept()[0].close()


def port_of(bound: socket.socket) -> int:
    port: int = bound.getsockname()[1]
    return port


def is_connected(client: socket.socket, timeout_s: float) -> bool:
    """Whether the connection is there, or has failed, in time."""
    return bool(select.select([], [client], [], timeout_s)[1])

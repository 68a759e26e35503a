"""Several client processes, started together, when one could not keep up."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, Final

import uvloop

from pagemesh.bench.client import ClientSaturated, Job, Share, ShareResult, Target, run_share
from pagemesh.shared.errors import PagemeshError

# Between the last client's readiness and the first request, for the word to get around.
_HEAD_START_S: Final = 0.1

OnOneDone = Callable[[], None]


class ClientDied(PagemeshError):
    """A client process ended without a result; the run is worth nothing."""


def most_clients(n_jobs: int, max_concurrency: int | None) -> int:
    """No more processes than cores, and none without a request to send at any time."""
    return max(min(os.cpu_count() or 1, n_jobs, max_concurrency or n_jobs), 1)


def split(
    target: Target,
    jobs: list[Job],
    max_concurrency: int | None,
    n_clients: int,
    *,
    give_up: bool = False,
) -> list[Share]:
    """Deal `jobs` and the concurrency out in turn. No client is left without either."""
    n_clients = max(min(n_clients, len(jobs), max_concurrency or n_clients), 1)
    return [
        Share(
            target, jobs[client::n_clients], _portion(max_concurrency, client, n_clients), give_up
        )
        for client in range(n_clients)
    ]


def run_shares(shares: list[Share], on_one_done: OnOneDone) -> list[ShareResult]:
    """Run each share in a process of its own; a single one in this process.

    Raises ClientSaturated when one gives up; the others are ended then.
    """
    if len(shares) == 1:
        return [uvloop.run(run_share(shares[0], time.monotonic(), lambda _: on_one_done()))]
    with ExitStack() as stack:
        connections = [_start(share, stack) for share in shares]
        for connection in connections:
            _receive(connection)  # ready
        start_s = time.monotonic() + _HEAD_START_S
        for connection in connections:
            connection.send(start_s)
        return _gather(connections, on_one_done)


def _portion(total: int | None, client: int, n_clients: int) -> int | None:
    return None if total is None else len(range(client, total, n_clients))


def _start(share: Share, stack: ExitStack) -> Connection:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_client, args=(theirs, share), daemon=True)
    process.start()
    theirs.close()
    stack.callback(process.join)
    stack.callback(process.terminate)
    stack.callback(ours.close)
    return ours


def _client(connection: Connection, share: Share) -> None:
    """The body of a client process. A Ctrl-C ends it without a word."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    connection.send("ready")
    start_s = connection.recv()
    try:
        connection.send(uvloop.run(run_share(share, start_s, lambda _: connection.send(None))))
    except ClientSaturated as gave_up:
        connection.send(gave_up)


def _gather(connections: list[Connection], on_one_done: OnOneDone) -> list[ShareResult]:
    results: list[ShareResult] = []
    running = list(connections)
    while running:
        for connection in wait(running):
            assert isinstance(connection, Connection)
            message = _receive(connection)
            if message is None:
                on_one_done()
            elif isinstance(message, ClientSaturated):
                raise message
            else:
                results.append(message)
                running.remove(connection)
    return results


def _receive(connection: Connection) -> Any:
    try:
        return connection.recv()
    except EOFError as error:
        raise ClientDied("a client process ended before its requests did") from error

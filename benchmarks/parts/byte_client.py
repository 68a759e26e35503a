"""A client process that counts bytes: python -m parts.byte_client '{"url": …}'. See `Drive`.

It prints a `Driven` when it is interrupted. Answers to the same request are of one length, so after
the first on a connection only bytes are counted.
"""

from __future__ import annotations

import re
import select
import signal
import socket
import sys
import time
from array import array
from typing import Final
from urllib.parse import urlsplit

import msgspec

from parts.drive import LONGEST_S, MARK, PATH, Drive, Driven

READ_BYTES: Final = 65536
POLL_S: Final = 0.2
_LENGTH: Final = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_END: Final = b"\r\n\r\n"


class Connection:
    """One that asks again when an answer is whole. Streams never are."""

    def __init__(self, load: Drive) -> None:
        address = urlsplit(load.url)
        self.socket = socket.create_connection((address.hostname, address.port))
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: {address.netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(load.body)}\r\n\r\n"
        )
        self._request = head.encode() + load.body
        self._answer_bytes = self._left_bytes = 0
        self._since_s = 0.0
        self.ask()

    def ask(self) -> None:
        self._left_bytes = self._answer_bytes
        self._since_s = time.monotonic()
        self.socket.sendall(self._request)

    def read(self, data: bytes, took_s: array[float]) -> bool:
        """Whether all is well."""
        if not self._answer_bytes:
            if not data.startswith(b"HTTP/1.1 200"):
                return False
            length = _LENGTH.search(data)
            whole_bytes = data.index(_END) + len(_END) + int(length[1]) if length else sys.maxsize
            self._answer_bytes = self._left_bytes = whole_bytes
        self._left_bytes -= len(data)
        if not self._left_bytes:
            took_s.append(time.monotonic() - self._since_s)
            self.ask()
        return bool(data)


def run(load: Drive) -> Driven:
    """Until SIGINT."""
    end_s = time.monotonic() + LONGEST_S

    def stop(*_: object) -> None:
        nonlocal end_s
        end_s = 0.0

    signal.signal(signal.SIGINT, stop)
    connections = [Connection(load) for _ in range(load.connections)]
    print("connected", flush=True)
    by_fd = {each.socket.fileno(): each for each in connections}
    n_bytes, n_errors, took_s = 0, 0, array("d")
    with select.epoll() as epoll:
        for fd in by_fd:
            epoll.register(fd, select.EPOLLIN)
        while (left_s := end_s - time.monotonic()) > 0 and by_fd:
            for fd, _ in epoll.poll(min(left_s, POLL_S)):
                data = by_fd[fd].socket.recv(READ_BYTES)
                n_bytes += len(data)
                if not by_fd[fd].read(data, took_s):
                    n_errors += 1
                    epoll.unregister(fd)
                    del by_fd[fd]
    ordered = sorted(took_s) or [0.0]
    return Driven(
        requests=len(took_s),
        bytes=n_bytes,
        errors=n_errors,
        p50_s=ordered[len(ordered) // 2],
        p99_s=ordered[len(ordered) * 99 // 100],
    )


if __name__ == "__main__":
    load = msgspec.json.decode(sys.argv[1], type=Drive)
    print(MARK + msgspec.json.encode(run(load)).decode())

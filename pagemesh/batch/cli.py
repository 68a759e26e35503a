"""`pagemesh run-batch`: the requests of an OpenAI batch file, answered into another file."""

from __future__ import annotations

import asyncio
import re
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

import aiohttp
from msgspec.structs import replace

from pagemesh.banner import gateway_url
from pagemesh.batch.output import STANDARD, Output
from pagemesh.batch.work import Work
from pagemesh.flags import Parser, add_setting_flags, load_given, normal_argv, refuse_unknown
from pagemesh.gateway.batches.lines import LINE_ROOM_BYTES, raw_lines
from pagemesh.gateway_port import free_port
from pagemesh.own_mesh import own_mesh
from pagemesh.shared.errors import StartupError
from pagemesh.shared.settings import Settings

EXIT_FAILED: Final = 1
CONCURRENCY: Final = 128
_POLL_S: Final = 0.1
_URL: Final = re.compile(r"https?://[^/\s]")
_HEADERS: Final = {"Content-Type": "application/json"}


def run_batch(argv: Sequence[str]) -> int:
    """0 when every request was answered, 1 when some failed. Raises StartupError."""
    parser = _parser()
    namespace, extras = parser.parse_known_args(normal_argv(argv))
    refuse_unknown(extras, parser)
    given = vars(namespace)
    names = ("input_file", "output_file", "url", "concurrency", "resume")
    options = {name: given.pop(name) for name in names}
    if options["concurrency"] < 1:
        raise StartupError("--concurrency must be at least 1")
    if options["url"] is not None and not _URL.match(options["url"]):
        raise StartupError("--url must begin with http:// or https:// and a host")
    return asyncio.run(_run(options, load_given(given).settings))


def _parser() -> Parser:
    parser = Parser(
        prog="pagemesh run-batch",
        description="Answer the requests of an OpenAI batch file (JSONL) into another file, in the "
        "order in which they are done: by a mesh of its own, or by the server at --url.",
        usage="%(prog)s [MODEL] -i FILE -o FILE [--flag VALUE …]",
    )
    add = parser.add_argument
    add("-i", "--input-file", required=True, metavar="FILE", help="requests; - reads stdin")
    add("-o", "--output-file", required=True, metavar="FILE", help="answers; - is stdout")
    add("--resume", action="store_true", default=False, help="go on with what -o holds already")
    add("--url", default=None, help="of a running server; default: serve MODEL meanwhile")
    help_text = f"most requests at a time (default: {CONCURRENCY})"
    add("--concurrency", type=int, default=CONCURRENCY, metavar="N", help=help_text)
    add_setting_flags(parser)
    return parser


async def _run(options: dict[str, Any], settings: Settings) -> int:
    name, resume = options["output_file"], options["resume"]
    with _source(options["input_file"]) as (source, n_lines), Output(name, resume=resume) as output:
        lines = raw_lines(source, settings.gateway.max_body_bytes + LINE_ROOM_BYTES)
        work = Work(lines, output, n_lines)
        async with _target(options["url"], settings) as (session, mesh):
            await _until_done(work, session, options["concurrency"], mesh)
    print(f"pagemesh: {work.summary()}", file=sys.stderr)
    return EXIT_FAILED if work.n_failed else 0


@contextmanager
def _source(name: str) -> Iterator[tuple[BinaryIO, int | None]]:
    """The input, and how many lines it has where that can be known. Raises StartupError."""
    if name == STANDARD:
        yield sys.stdin.buffer, None
        return
    with _opened(name) as file:
        n_lines = sum(1 for raw in file if raw.strip())
        file.seek(0)
        yield file, n_lines


def _opened(name: str) -> BinaryIO:
    try:
        return Path(name).open("rb")
    except OSError as error:
        raise StartupError(f"cannot read {name}: {error.strerror}") from error


async def _until_done(
    work: Work, session: aiohttp.ClientSession, concurrency: int, mesh: Process | None
) -> None:
    """Raises StartupError when the mesh of our own ends before."""
    working = asyncio.create_task(work.run(session, concurrency))
    tasks: set[asyncio.Task[Any]] = {working}
    if mesh is not None:
        tasks.add(asyncio.create_task(mesh.wait()))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise StartupError("the mesh ended before the batch; go on with --resume")
        working.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def _target(
    url: str | None, settings: Settings
) -> AsyncIterator[tuple[aiohttp.ClientSession, Process | None]]:
    """A session for the server, and the mesh behind it if that is ours."""
    async with AsyncExitStack() as stack:
        mesh = None
        if url is None:
            settings = _of_our_own(settings)
            url = gateway_url(settings.gateway)
            mesh = await stack.enter_async_context(own_mesh(settings))
        session = await stack.enter_async_context(_session(url, settings, verify=mesh is None))
        if mesh is not None:
            await _until_ready(session, mesh)
        yield session, mesh


def _of_our_own(settings: Settings) -> Settings:
    """On a free port that nobody else reaches. What it logs stands beside our progress."""
    gateway = replace(settings.gateway, host="127.0.0.1", port=0)
    port = free_port(gateway)
    log = replace(settings.log, log_level="error")
    return replace(settings, gateway=replace(gateway, port=port), log=log)


def _session(url: str, settings: Settings, *, verify: bool) -> aiohttp.ClientSession:
    keys = settings.gateway.api_key
    key = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    return aiohttp.ClientSession(
        url.rstrip("/").removesuffix("/v1"),
        headers={**_HEADERS, **key},
        timeout=aiohttp.ClientTimeout(total=None),
        connector=aiohttp.TCPConnector(limit=0, ssl=verify),
    )


async def _until_ready(session: aiohttp.ClientSession, mesh: Process) -> None:
    """Raises StartupError when it ends before; why, it has said itself."""
    while not await _is_ready(session):
        if mesh.returncode is not None:
            raise StartupError("the mesh for this batch did not start")
        await asyncio.sleep(_POLL_S)


async def _is_ready(session: aiohttp.ClientSession) -> bool:
    try:
        async with session.get("/ready") as answer:
            return answer.status == 200
    except (aiohttp.ClientError, OSError):
        return False

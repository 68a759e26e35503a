"""TLS on links: both sides are members of the mesh, or there is no link and a sentence says why."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import aiohttp
import pytest
from aiohttp import web
from certificates import Certified, Identity, certify
from msgspec.structs import replace
from structlog.testing import capture_logs

from pagemesh.shared import peers as peers_module
from pagemesh.shared.errors import HandshakeRefused, StartupError
from pagemesh.shared.link import LINK_PATH, accept, dial
from pagemesh.shared.messages import Cancel, Hello
from pagemesh.shared.peers import Peers
from pagemesh.shared.registry import Instance, Registry
from pagemesh.shared.service import Runtime, serve
from pagemesh.shared.settings import GatewaySettings, MeshSettings, Settings
from pagemesh.shared.tls import client_facing_context, dialling_context, listening_context
from pagemesh.shared.wire import PROTOCOL

LISTENER = Hello(PROTOCOL, "worker", "worker-1", 7, "secret")
DIALLER = Hello(PROTOCOL, "scheduler", "scheduler-1", 9, "secret")
PLAIN = MeshSettings()


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Certified:
    return certify(tmp_path_factory.mktemp("certificates"))


@asynccontextmanager
async def listening(mesh: MeshSettings) -> AsyncIterator[str]:
    """The address of a service that greets whoever opens a link."""

    async def endpoint(request: web.Request) -> web.WebSocketResponse:
        link, socket = await accept(request, LISTENER)
        if link is not None:
            link.send(Cancel("greetings"))
            async for _ in link:
                pass
            await link.close()
        return socket

    app = web.Application()
    app.router.add_get(LINK_PATH, endpoint)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=listening_context(mesh)).start()
    try:
        yield "{}:{}".format(*runner.addresses[0])
    finally:
        await runner.cleanup()


async def greeted(address: str, mesh: MeshSettings, hello: Hello = DIALLER) -> bool:
    """Whether there is a link. Raises HandshakeRefused."""
    async with aiohttp.ClientSession() as session:
        link = await dial(session, address, hello, dialling_context(mesh))
        try:
            return await anext(aiter(link)) == Cancel("greetings")
        finally:
            await link.close()


def settings_of(certified: Certified, name: str) -> MeshSettings:
    if name == "plain":
        return PLAIN
    identity: Identity = getattr(certified, name)
    return identity.mesh()


async def test_members_link(certified: Certified) -> None:
    async with listening(certified.member.mesh()) as address:
        assert await greeted(address, certified.member.mesh())


async def test_a_certificate_is_no_secret(certified: Certified) -> None:
    async with listening(certified.member.mesh()) as address:
        with pytest.raises(HandshakeRefused, match="mesh secret"):
            await greeted(address, certified.member.mesh(), DIALLER._replace(secret=""))


@pytest.mark.parametrize(
    ("who", "told", "logged"),
    [
        ("foreign", "--mesh-certfile", "one of --mesh-cafile: unable to get local issuer"),
        ("expired", "--mesh-certfile may have expired", "--mesh-cafile: certificate has expired"),
        ("plain", "may want TLS (--mesh-certfile", "a peer spoke plain text: it needs --mesh-cert"),
    ],
)
async def test_others_cannot_dial(certified: Certified, who: str, told: str, logged: str) -> None:
    """Both sides say why, the listener once a minute however often somebody knocks."""
    with capture_logs() as logs:
        async with listening(certified.member.mesh()) as address:
            for _ in range(3):
                with pytest.raises(HandshakeRefused) as refused:
                    await greeted(address, settings_of(certified, who))
                assert told in refused.value.reason
            assert await greeted(address, certified.member.mesh())
    reasons = [line["reason"] for line in logs if line["event"] == "tls_refused"]
    assert len(reasons) == 1
    assert logged in reasons[0]


@pytest.mark.parametrize(
    ("who", "told"),
    [
        ("foreign", "not one of --mesh-cafile: unable to get local issuer certificate"),
        ("expired", "not one of --mesh-cafile: certificate has expired"),
        ("plain", "does not speak TLS as we do: give every service --mesh-certfile"),
    ],
)
async def test_others_cannot_be_dialled(certified: Certified, who: str, told: str) -> None:
    async with listening(settings_of(certified, who)) as address:
        with pytest.raises(HandshakeRefused) as refused:
            await greeted(address, certified.member.mesh())
        assert told in refused.value.reason


async def test_somebody_without_a_certificate_gets_no_answer(certified: Certified) -> None:
    """Though he trusts the mesh and speaks its TLS."""
    trusting = ssl.create_default_context(cafile=str(certified.member.cafile))
    with capture_logs() as logs:
        async with (
            listening(certified.member.mesh()) as address,
            aiohttp.ClientSession() as session,
        ):
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"https://{address}{LINK_PATH}", ssl=trusting)
    assert "a peer showed no certificate" in logs[0]["reason"]


async def test_a_peer_that_refuses_us_is_named_once(
    certified: Certified, redis_url: str, mesh_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "MAX_BACKOFF_S", 0.01)
    registry = Registry(redis_url, mesh_name)
    dialled: asyncio.Queue[None] = asyncio.Queue()

    def hello() -> Hello:
        dialled.put_nowait(None)
        return DIALLER

    async with listening(certified.member.mesh()) as address, aiohttp.ClientSession() as session:
        runtime = Runtime("scheduler", Settings(mesh=certified.foreign.mesh()), registry, session)
        peers = Peers(
            "worker", registry, session, hello, _nothing, runtime.metrics, runtime.link_tls
        )
        tasks = [
            asyncio.create_task(registry.announce(Instance("worker", "worker-1", address, 7))),
            asyncio.create_task(peers.run()),
        ]
        with capture_logs() as logs:
            for _ in range(4):
                await dialled.get()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await registry.close()
    told = [line for line in logs if line["event"] == "handshake_refused"]
    assert [line["peer"] for line in told] == ["worker-1"]


async def _nothing(_: object) -> None:
    raise AssertionError("there is no link")


@pytest.mark.parametrize("context", [listening_context, dialling_context])
def test_files_that_will_not_do_are_one_sentence(
    certified: Certified, tmp_path: Path, context: object
) -> None:
    assert callable(context)
    member, junk = certified.member.mesh(), tmp_path / "junk.pem"
    junk.write_text("junk")
    for field in ("mesh_certfile", "mesh_keyfile", "mesh_cafile"):
        for file in (junk, tmp_path / "missing.pem"):
            with pytest.raises(StartupError, match=str(file)):
                context(replace(member, **{field: str(file)}))
    other = str(certified.foreign.keyfile)
    with pytest.raises(StartupError, match=other):
        context(replace(member, mesh_keyfile=other))


def test_an_encrypted_key_is_refused_instead_of_asked_for(
    certified: Certified, tmp_path: Path
) -> None:
    encrypted, chain = tmp_path / "encrypted.key", str(certified.member.certfile)
    encrypt = ["openssl", "ec", "-aes256", "-passout", "pass:hidden", "-out", encrypted]
    subprocess.run([*encrypt, "-in", certified.member.keyfile], check=True, capture_output=True)
    with pytest.raises(StartupError, match=r"encrypted\.key is encrypted"):
        client_facing_context(GatewaySettings(ssl_certfile=chain, ssl_keyfile=str(encrypted)))


# -- Redis ----------------------------------------------------------------------------------------


@asynccontextmanager
async def redis_behind_tls(redis_url: str, identity: Identity) -> AsyncIterator[str]:
    """The address of a TLS port before the Valkey of the tests."""
    socket = urlsplit(redis_url).path
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(identity.certfile, identity.keyfile)
    pipes: set[asyncio.Task[None]] = set()

    async def pipe(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            sink.write(data)
        sink.close()

    async def serve_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(socket)
        for each in (pipe(reader, inner_writer), pipe(inner_reader, writer)):
            pipes.add(asyncio.create_task(each))

    server = await asyncio.start_server(serve_client, "127.0.0.1", 0, ssl=context)
    try:
        yield "{}:{}".format(*server.sockets[0].getsockname())
    finally:
        server.close()
        for task in pipes:
            task.cancel()
        await asyncio.gather(*pipes, return_exceptions=True)


async def test_the_registry_may_be_behind_tls(
    certified: Certified, redis_url: str, mesh_name: str
) -> None:
    [password] = parse_qs(urlsplit(redis_url).query)["password"]
    async with redis_behind_tls(redis_url, certified.member) as address:
        url = f"rediss://:{password}@{address}?ssl_ca_certs={certified.member.cafile}"
        registry, instance = Registry(url, mesh_name), Instance("worker", "worker-1", "a:1", 1)
        beat = asyncio.create_task(registry.announce(instance))
        async for instances in registry.watch("worker"):
            if instances:
                break
        assert instances == [instance]
        beat.cancel()
        await asyncio.gather(beat, return_exceptions=True)
        await registry.close()


async def test_a_registry_of_an_unknown_ca_is_refused(
    certified: Certified, redis_url: str, mesh_name: str
) -> None:
    async with redis_behind_tls(redis_url, certified.member) as address:
        url = f"rediss://:hidden@{address}"
        settings = Settings(mesh=MeshSettings(redis_url=url, mesh_name=mesh_name))
        with pytest.raises(StartupError, match="certificate verify failed") as caught:
            await serve("worker", settings, _never, host="127.0.0.1", port=0)
    assert "hidden" not in str(caught.value)


def _never(_: Runtime) -> web.Application:
    raise AssertionError("nothing is built")

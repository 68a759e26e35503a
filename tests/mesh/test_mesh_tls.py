"""A real mesh with TLS on every hop, and strangers at its doors."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp
import pytest
import requests
from aiohttp.connector import AddrInfoType
from certificates import Certified, Identity, certify
from mesh_process import SMALL_MESH, MeshProcess, clean_environ, running_mesh, wait_until

from pagemesh.shared.errors import HandshakeRefused
from pagemesh.shared.link import Link, dial
from pagemesh.shared.messages import Hello
from pagemesh.shared.settings import MeshSettings
from pagemesh.shared.tls import dialling_context
from pagemesh.shared.wire import PROTOCOL

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]
INNER: Final = ("tokenizer", "scheduler", "worker")
STORY: Final = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 24}


class SecureMesh(NamedTuple):
    mesh: MeshProcess
    certified: Certified

    @property
    def url(self) -> str:
        return self.mesh.base_url.replace("http:", "https:")

    def environ(self) -> dict[str, str]:
        """Of a service of this mesh: where the registry is, and the mesh secret."""
        environ = self.mesh.child("scheduler").environ()
        names = ("PAGEMESH_REDIS_URL", "PAGEMESH_MESH_SECRET")
        return {name: environ[name] for name in names}

    def log_lines(self) -> list[dict[str, str]]:
        return [json.loads(line) for line in self.mesh.log.read_text().splitlines()]

    def address_of(self, service: str) -> str:
        return next(
            line["address"]
            for line in reversed(self.log_lines())
            if (line["event"], line.get("service")) == ("listening", service)
        )

    async def dial(self, service: str, identity: Identity | None, secret: str) -> Link:
        """Open a link, and close it. Raises HandshakeRefused."""
        mesh = MeshSettings() if identity is None else identity.mesh()
        hello = Hello(PROTOCOL, "stranger", "stranger-1", 1, secret)
        async with session_that_closes_sockets() as session:
            link = await dial(session, self.address_of(service), hello, dialling_context(mesh))
            await link.close()
            return link


@asynccontextmanager
async def session_that_closes_sockets() -> AsyncIterator[aiohttp.ClientSession]:
    """A session of aiohttp ends before the goodbyes of its TLS connections; this one after them."""
    opened: list[socket.socket] = []

    def open_socket(address: AddrInfoType) -> socket.socket:
        opened.append(socket.socket(*address[:3]))
        return opened[-1]

    try:
        connector = aiohttp.TCPConnector(socket_factory=open_socket)
        async with aiohttp.ClientSession(connector=connector) as session:
            yield session
    finally:
        async with asyncio.timeout(10):
            while any(each.fileno() != -1 for each in opened):  # noqa: ASYNC110 -- no event
                await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def secure(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureMesh]:
    assert smollm2_folder.is_dir()
    folder = tmp_path_factory.mktemp("secure")
    certified = certify(folder)
    member = certified.member
    https = ("--ssl-certfile", str(member.certfile), "--ssl-keyfile", str(member.keyfile))
    with running_mesh(folder, *SMALL_MESH, *https, *member.flags()) as mesh:
        yield SecureMesh(mesh, certified)


def test_a_streamed_answer_comes_through_every_hop(secure: SecureMesh, mesh: MeshProcess) -> None:
    """The same as from a mesh without TLS."""

    def told(url: str, verify: str | bool) -> list[str]:
        body = {**STORY, "model": "smollm2-135m-instruct", "stream": True}
        with requests.post(
            f"{url}/v1/completions", json=body, stream=True, verify=verify, timeout=100
        ) as answer:
            lines = [line for line in answer.iter_lines() if line.startswith(b"data: ")]
        assert lines[-1] == b"data: [DONE]"
        chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]
        return [chunk["choices"][0]["text"] for chunk in chunks]

    pieces = told(secure.url, str(secure.certified.member.cafile))
    assert len(pieces) > 2
    assert "".join(pieces) == "".join(told(mesh.base_url, True))


@pytest.mark.parametrize("service", INNER)
async def test_only_members_who_know_the_secret_open_links(
    secure: SecureMesh, service: str
) -> None:
    secret = secure.environ()["PAGEMESH_MESH_SECRET"]
    for identity, reason in (
        (None, "may want TLS"),
        (secure.certified.expired, "--mesh-certfile may have expired"),
        (secure.certified.foreign, "or be of another --mesh-cafile"),
    ):
        with pytest.raises(HandshakeRefused, match=reason):
            await secure.dial(service, identity, secret)
    with pytest.raises(HandshakeRefused, match="mesh secret"):
        await secure.dial(service, secure.certified.member, "another")
    if service == "worker":  # which obeys one scheduler, and asks for its lease next
        with pytest.raises(HandshakeRefused, match="lease"):
            await secure.dial(service, secure.certified.member, secret)
    else:
        link = await secure.dial(service, secure.certified.member, secret)
        assert link.peer.service == service
    log = secure.log_lines()
    reasons = [line["reason"] for line in log if line["event"] == "tls_refused"]
    for reason in ("unable to get local issuer", "has expired", "spoke plain text"):
        assert any(reason in each and "--mesh-" in each for each in reasons)
    assert "Traceback" not in secure.mesh.log.read_text()


def test_inner_services_answer_only_members(secure: SecureMesh) -> None:
    member = secure.certified.member
    for service in INNER:
        address = secure.address_of(service)
        for url in (f"http://{address}/health", f"https://{address}/metrics"):
            with pytest.raises(requests.ConnectionError):
                requests.get(url, verify=str(member.cafile), timeout=10)
        known = {"verify": str(member.cafile), "cert": (str(member.certfile), str(member.keyfile))}
        for path, status in (("/metrics", 200), ("/nowhere", 401), ("/admin/x", 401)):
            answer = requests.get(f"https://{address}{path}", timeout=10, **known)
            assert answer.status_code == status, (service, path)


@contextmanager
def foreign_gateway(secure: SecureMesh, log: Path, *flags: str) -> Iterator[None]:
    """It has the registry and the mesh secret, but another idea of TLS; it must end well."""
    command = [sys.executable, "-m", "pagemesh.cli", "gateway", "--port", "0", *flags]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command, stderr=stderr, env={**clean_environ(), **secure.environ()}
        )
    try:
        yield
        assert process.poll() is None, log.read_text()
    finally:
        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("who", "told"),
    [
        ("foreign", "our --mesh-certfile may have expired, or be of another --mesh-cafile"),
        ("expired", "our --mesh-certfile may have expired"),
        ("plain", "it may want TLS (--mesh-certfile"),
    ],
)
def test_a_service_without_a_good_certificate_says_so_once_and_waits(
    secure: SecureMesh, tmp_path: Path, who: str, told: str
) -> None:
    log = tmp_path / "gateway.log"
    flags = [] if who == "plain" else getattr(secure.certified, who).flags()
    with foreign_gateway(secure, log, *flags):
        wait_until(lambda: "handshake_refused" in log.read_text(), 60)
        # Time for another try, two seconds after the first.
        time.sleep(3)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    [refused] = [line for line in lines if line["event"] == "handshake_refused"]
    assert told in refused["reason"]
    assert "Traceback" not in log.read_text()
    cafile = str(secure.certified.member.cafile)
    assert requests.get(f"{secure.url}/ready", verify=cafile, timeout=10).status_code == 200

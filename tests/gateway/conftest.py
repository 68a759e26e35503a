"""A gateway over one scripted tokenizer service that answers by itself."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from gateway_fakes import (
    FakeTokenizer,
    Gateway,
    Tls,
    fake_tokenizer,
    running_gateway,
    say_hello,
    settings_for,
)

from pagemesh.shared.settings import Settings


@pytest.fixture
def settings(redis_url: str, mesh_name: str) -> Settings:
    return settings_for(redis_url, mesh_name)


@pytest.fixture
async def tokenizer(settings: Settings) -> AsyncIterator[FakeTokenizer]:
    async with fake_tokenizer(settings, script=say_hello) as fake:
        yield fake


@pytest.fixture
async def gateway(settings: Settings, tokenizer: FakeTokenizer) -> AsyncIterator[Gateway]:
    async with running_gateway(settings) as gateway:
        await gateway.until_ready()
        yield gateway


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A self-signed certificate of 127.0.0.1 and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    subject = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run([*make.split(), *subject], check=True, capture_output=True)
    return certificate, key


@pytest.fixture
def tls(certificate: tuple[Path, Path]) -> Tls:
    chain, key = certificate
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(chain, key)
    return Tls(server, ssl.create_default_context(cafile=chain))

"""A gateway over one scripted tokenizer service that answers by itself."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from gateway_fakes import (
    FakeTokenizer,
    Gateway,
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

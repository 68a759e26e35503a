"""Fixtures of the scheduler's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import aiohttp
import pytest
from msgspec.structs import replace
from service_harness import Scheduler, Start
from structlog.testing import capture_logs
from structlog.typing import EventDict

from pagemesh.shared.settings import MeshSettings, SchedulerSettings, Settings


@pytest.fixture(autouse=True)
def log_lines() -> Iterator[list[EventDict]]:
    """What was logged; nothing is printed."""
    with capture_logs() as lines:
        yield lines


@pytest.fixture
async def start(redis_url: str, mesh_name: str) -> AsyncIterator[Start]:
    """Starts schedulers with the given scheduler settings; stops them after the test."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())

        async def start_one(**options: object) -> Scheduler:
            settings = replace(
                Settings(),
                mesh=MeshSettings(redis_url=redis_url, mesh_name=mesh_name),
                scheduler=SchedulerSettings(**options),  # type: ignore[arg-type]
            )
            scheduler = Scheduler(settings, session)
            stack.push_async_callback(scheduler.stop)
            await scheduler.start()
            return scheduler

        yield start_one  # type: ignore[misc]

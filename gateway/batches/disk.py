"""Disk work of handlers, in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import structlog

from pagemesh.shared.errors import RequestError

T = TypeVar("T")
log = structlog.get_logger(__name__)


async def on_disk(call: Callable[..., T], *args: object) -> T:
    """Raises RequestError (503) when the folder of files will not do, and what `call` raises."""
    try:
        return await asyncio.to_thread(call, *args)
    except OSError as error:
        log.error("files_dir_failed", error=str(error))
        raise RequestError(
            f"The folder of files (--files-dir) cannot be used: {error.strerror}.",
            status=503,
            code="service_unavailable",
        ) from error

"""How long a client gives its answer: then what still runs is cancelled, wherever it is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import inf
from typing import Any, Final

from aiohttp import web

from pagemesh.gateway.generation import Generation
from pagemesh.shared.errors import RequestError

HEADER: Final = "X-Request-Timeout"
_PATIENCE_S: Final = 0.5
"""For a client to be told."""
_AT_LEISURE: Final = nullcontext()


def timeout_of(request: web.Request, field_s: float | None) -> float | None:
    """The body's `timeout` in seconds, or the header's; None: as long as it takes.

    Raises RequestError (400) unless it is a positive number.
    """
    if field_s is not None:
        return _positive(field_s, "timeout")
    given = request.headers.get(HEADER)
    return None if given is None else _positive(_number(given), HEADER)


def cut_off(generation: Generation, timeout_s: float | None) -> AbstractContextManager[None]:
    """Fail `generation` with 504 if the block takes longer. A handler that hangs on, because its
    client reads nothing, is cancelled."""
    if timeout_s is None:
        return _AT_LEISURE
    task = asyncio.current_task()
    assert task is not None
    return _timed(generation, timeout_s, task)


@contextmanager
def _timed(generation: Generation, timeout_s: float, task: asyncio.Task[Any]) -> Iterator[None]:
    late = too_late(timeout_s)
    loop = asyncio.get_running_loop()
    timers = [
        loop.call_later(timeout_s, generation.fail, late),
        loop.call_later(timeout_s + _PATIENCE_S, task.cancel),
    ]
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()


def too_late(timeout_s: float) -> RequestError:
    return RequestError(
        f"The answer was not complete within the {timeout_s:g} s that the request allows.",
        status=504,
        code="deadline_exceeded",
    )


def _number(given: str) -> float:
    try:
        return float(given)
    except ValueError:
        return -1.0


def _positive(timeout_s: float, param: str) -> float:
    if not 0 < timeout_s < inf:
        raise RequestError(f"{param} must be a positive number of seconds", param=param)
    return timeout_s

"""How long a client gives its answer: then what still runs is cancelled, wherever it is."""

from __future__ import annotations

import asyncio
from math import inf
from typing import Final

from aiohttp import web

from pagemesh.gateway.generation import Generation
from pagemesh.shared.errors import RequestError

HEADER: Final = "X-Request-Timeout"
_PATIENCE_S: Final = 0.5
"""For a client to be told."""


def timeout_of(request: web.Request, field_s: float | None) -> float | None:
    """The body's `timeout` in seconds, or the header's; None: as long as it takes.

    Raises RequestError (400) unless it is a positive number.
    """
    if field_s is not None:
        return _positive(field_s, "timeout")
    given = request.headers.get(HEADER)
    return None if given is None else _positive(_number(given), HEADER)


def cut_off(generation: Generation, timeout_s: float | None) -> list[asyncio.TimerHandle]:
    """Fail `generation` with 504 if it takes longer, unless all that is returned is cancelled
    before. This task is then cancelled if it hangs on, because its client reads nothing."""
    if timeout_s is None or (task := asyncio.current_task()) is None:
        return []
    loop = asyncio.get_running_loop()
    return [
        loop.call_later(timeout_s, generation.fail, too_late(timeout_s)),
        loop.call_later(timeout_s + _PATIENCE_S, task.cancel),
    ]


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

"""A process that is stuck ends, for its supervisor to start a new one.

`/health` and the links' heartbeats tell others that an event loop stands still; nobody but the
process itself can say where. So a thread watches the loop. It needs the interpreter: a native call
that never returns and holds on to the GIL is left to whoever probes `/health`.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, NoReturn

import structlog

from pagemesh.shared.errors import Stalled
from pagemesh.shared.progress import LOOK_S, LivedTime

EXIT_STALLED: Final = 70
"""The exit status of a process that ended because it was stuck (sysexits.h: EX_SOFTWARE)."""

log = structlog.get_logger(__name__)


def dump_stacks() -> None:
    """What every thread is doing, to standard error."""
    with suppress(OSError, ValueError):  # whoever read it may be gone
        faulthandler.dump_traceback(sys.__stderr__ or 2)


def leave(reason: str) -> NoReturn:
    """End the process at once: threads that are stuck are not waited for, nor are their devices."""
    with suppress(OSError, ValueError):
        print(f"pagemesh: error: {reason}", file=sys.stderr, flush=True)
    os._exit(EXIT_STALLED)


async def watched(work: Coroutine[Any, Any, None], timeout_s: float) -> None:
    """Run `work`, and end the process when this event loop stands still for `timeout_s`."""
    with _watchdog(asyncio.get_running_loop(), timeout_s):
        await work


@contextmanager
def _watchdog(loop: asyncio.AbstractEventLoop, timeout_s: float) -> Iterator[None]:
    over = threading.Event()
    arguments = (loop, timeout_s, over)
    threading.Thread(target=_watch, args=arguments, name="watchdog", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _watch(loop: asyncio.AbstractEventLoop, timeout_s: float, over: threading.Event) -> None:
    lived, still_s = LivedTime(time.monotonic()), 0.0
    turned = threading.Event()
    turned.set()
    while not over.wait(LOOK_S):
        lived_s = lived.look(time.monotonic())
        if not turned.is_set():
            still_s += lived_s
        else:
            still_s = 0.0
            turned.clear()
            with suppress(RuntimeError):  # the loop is closed: it ends already
                loop.call_soon_threadsafe(turned.set)
        if still_s > timeout_s:
            log.error("event_loop_stuck", seconds=round(still_s))
            dump_stacks()
            leave(str(Stalled(f"the event loop has stood still for {still_s:.0f} s")))

"""A process whose event loop stands still, and one that was only stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from pagemesh.shared.watchdog import EXIT_STALLED

TIMEOUT_S: Final = 1.5
PROGRAM: Final = """
import asyncio, sys, time
from pagemesh.shared.watchdog import watched

def stand_still_here(seconds):
    time.sleep(seconds)

async def work():
    print("up", flush=True)
    if sys.argv[1] == "stuck":
        stand_still_here(60)
    await asyncio.to_thread(sys.stdin.readline)  # the loop turns

asyncio.run(watched(work(), float(sys.argv[2])))
"""


@contextmanager
def running(how: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how, str(TIMEOUT_S)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    with process:
        yield process
        process.kill()


def test_an_event_loop_that_stands_still_ends_its_process_with_its_stacks() -> None:
    with running("stuck") as process:
        _, errors = process.communicate(timeout=30)
        assert process.returncode == EXIT_STALLED
    assert "in stand_still_here" in errors
    assert "pagemesh: error: the event loop has stood still" in errors


def test_a_process_that_was_stopped_goes_on() -> None:
    with running("well") as process:
        process.send_signal(signal.SIGSTOP)
        time.sleep(2 * TIMEOUT_S)
        process.send_signal(signal.SIGCONT)
        time.sleep(TIMEOUT_S)
        assert process.poll() is None
        process.communicate("over\n", timeout=30)
        assert process.returncode == 0

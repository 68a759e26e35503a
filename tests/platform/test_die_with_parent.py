"""Children go when their parent goes, however it goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

PARENT = """
import subprocess, sys
from pagemesh.supervisor import guarded
program = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
child = subprocess.Popen(guarded((sys.executable, "-c", program)), start_new_session=True)
child.wait()
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_the_child_of_a_killed_parent_is_gone(signum: signal.Signals) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    os.kill(parent.pid, signum)
    parent.wait()
    # The pipe is the child's too: it ends when both are gone.
    assert parent.stdout.read() == ""
    parent.stdout.close()
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_child_whose_parent_is_already_gone_does_not_start() -> None:
    command = [sys.executable, "-m", "pagemesh.die_with_parent", "1", "echo", "started"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "its parent, is gone" in done.stderr

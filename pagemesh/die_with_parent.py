"""Run a command that the kernel kills when the process that started it dies, kill -9 included.

    python -m pagemesh.die_with_parent PARENT_PID COMMAND ARGUMENT…

The setting survives exec, so it works for any program. It is Linux's; elsewhere the command runs
without it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the line above.
    if os.getppid() != parent_pid:
        sys.exit(f"{command[0]} is not started: process {parent_pid}, its parent, is gone")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()

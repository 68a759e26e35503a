"""Supervision of real child processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

from pagemesh.shared.errors import StartupError
from pagemesh.supervisor import (
    MAX_TRIES,
    TAIL_LINES,
    ChildFailed,
    ChildSpec,
    Supervisor,
    describe_exit,
)

GRACE_S: Final = 10.0
PAUSE: Final = """
import os, signal, sys
print(f"up {os.getpid()} {os.getppid()}", flush=True)
while True:
    signal.pause()
"""
STUBBORN: Final = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + PAUSE


def python(name: str, program: str, *, quiet: bool = False, config: bytes = b"") -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-c", program), dict(os.environ), config, quiet)


class Mesh:
    """A supervisor whose children's lines arrive in a queue."""

    def __init__(self) -> None:
        self.lines: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.supervisor = Supervisor(lambda name, line: self.lines.put_nowait((name, line)))

    async def pid_of_next(self) -> int:
        _, line = await self.lines.get()
        return int(line.split()[1])


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    mesh = Mesh()
    yield mesh
    mesh.supervisor.kill()
    await mesh.supervisor.stop(GRACE_S)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_lines_come_with_the_childs_name(mesh: Mesh) -> None:
    mesh.supervisor.start(python("a", PAUSE))
    name, line = await mesh.lines.get()
    assert name == "a"
    assert line.startswith("up ")


async def test_a_child_that_ends_is_started_again(mesh: Mesh) -> None:
    mesh.supervisor.start(python("a", PAUSE))
    first = await mesh.pid_of_next()
    os.kill(first, signal.SIGKILL)
    second = await mesh.pid_of_next()
    assert second != first
    assert not is_alive(first)


async def test_a_child_that_cannot_start_ends_the_watch_with_its_last_lines(mesh: Mesh) -> None:
    mesh.supervisor.start(python("a", "print('the cause'); raise SystemExit(7)"))
    with pytest.raises(ChildFailed) as caught:
        await mesh.supervisor.watch()
    assert caught.value.exit_code == 7
    assert "a cannot start (exit code 7, 3 tries)" in str(caught.value)
    assert caught.value.tail == ["the cause"] * MAX_TRIES


async def test_once_the_mesh_was_ready_nothing_gives_up(mesh: Mesh) -> None:
    mesh.supervisor.mark_ready()
    mesh.supervisor.start(python("a", "print('started'); raise SystemExit(7)"))
    for _ in range(MAX_TRIES + 1):
        assert await mesh.lines.get() == ("a", "started")


async def test_the_sentence_of_a_startup_error_ends_the_watch_at_once(mesh: Mesh) -> None:
    program = "import sys; print('pagemesh: error: no such model', file=sys.stderr); sys.exit(2)"
    mesh.supervisor.start(python("a", program))
    with pytest.raises(StartupError, match=r"^no such model$"):
        await mesh.supervisor.watch()
    assert mesh.lines.empty()


async def test_the_last_started_stops_first(mesh: Mesh) -> None:
    farewell = """
import signal, sys
def bye(*_):
    print("bye", flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, bye)
print("up", flush=True)
signal.pause()
"""
    for name in ("first", "second", "third"):
        mesh.supervisor.start(python(name, farewell))
        assert await mesh.lines.get() == (name, "up")
    await mesh.supervisor.stop(GRACE_S)
    said = [mesh.lines.get_nowait() for _ in range(mesh.lines.qsize())]
    assert said == [("third", "bye"), ("second", "bye"), ("first", "bye")]


async def test_those_started_together_stop_together(mesh: Mesh, tmp_path: Path) -> None:
    farewell = """
import os, signal, sys, time
own, other = sys.stdin.read().split()
def bye(*_):
    open(own, "w").close()
    while not os.path.exists(other):
        time.sleep(0.01)
    sys.exit()
signal.signal(signal.SIGTERM, bye)
print("up", flush=True)
signal.pause()
"""
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    configs = {"one": f"{one} {two}", "two": f"{two} {one}"}
    mesh.supervisor.start(
        *(python(name, farewell, config=text.encode()) for name, text in configs.items())
    )
    assert {await mesh.lines.get() for _ in configs} == {("one", "up"), ("two", "up")}
    # Each waits for the word that the other one has been told.
    await mesh.supervisor.stop(grace_s=3600)


async def test_who_ignores_sigterm_is_killed(mesh: Mesh) -> None:
    mesh.supervisor.start(python("a", STUBBORN))
    pid = await mesh.pid_of_next()
    await mesh.supervisor.stop(0.05)
    assert not is_alive(pid)


async def test_a_frozen_child_does_not_hold_up_the_stop(mesh: Mesh) -> None:
    mesh.supervisor.start(python("a", PAUSE))
    pid = await mesh.pid_of_next()
    os.kill(pid, signal.SIGSTOP)
    await mesh.supervisor.stop(0.05)
    assert not is_alive(pid)


async def test_kill_is_quick_and_final(mesh: Mesh) -> None:
    mesh.supervisor.start(python("a", STUBBORN))
    pid = await mesh.pid_of_next()
    stopping = asyncio.create_task(mesh.supervisor.stop(3600))
    mesh.supervisor.kill()
    await stopping
    assert not is_alive(pid)
    assert mesh.lines.empty()


async def test_children_get_their_configuration_on_standard_input(mesh: Mesh) -> None:
    echo = "import sys; print(sys.stdin.read(), flush=True)" + PAUSE
    mesh.supervisor.start(python("a", echo, config=b"password abc"))
    assert await mesh.lines.get() == ("a", "password abc")


async def test_a_quiet_child_speaks_only_when_it_fails(mesh: Mesh) -> None:
    mesh.supervisor.start(python("a", "print('noise'); raise SystemExit(1)", quiet=True))
    with pytest.raises(ChildFailed, match="noise"):
        await mesh.supervisor.watch()
    assert mesh.lines.empty()


async def test_endless_lines_and_broken_utf8_are_forwarded_in_pieces(mesh: Mesh) -> None:
    program = "import sys; sys.stdout.buffer.write(b'x' * 300_000 + b'\\xff\\n')"
    mesh.supervisor.mark_ready()
    mesh.supervisor.start(python("a", program))
    text = ""
    while not text.endswith("�"):
        text += (await mesh.lines.get())[1]
    assert text == "x" * 300_000 + "�"


async def test_the_tail_is_bounded(mesh: Mesh) -> None:
    mesh.supervisor.start(python("a", "print('\\n'.join(map(str, range(1000)))); exit(1)"))
    with pytest.raises(ChildFailed) as caught:
        await mesh.supervisor.watch()
    assert caught.value.tail == [str(number) for number in range(1000 - TAIL_LINES, 1000)]


async def test_a_child_runs_in_a_session_of_its_own(mesh: Mesh) -> None:
    mesh.supervisor.start(python("a", PAUSE))
    pid = await mesh.pid_of_next()
    assert os.getsid(pid) != os.getsid(0)


@pytest.mark.parametrize(
    ("code", "text"), [(3, "exit code 3"), (-9, "killed by SIGKILL"), (-99, "killed by signal 99")]
)
def test_exits_are_described(code: int, text: str) -> None:
    assert describe_exit(code) == text

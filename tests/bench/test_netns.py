"""Hosts in network namespaces: they reach each other, by name too, until one is cut off."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from parts.netns import Host, Network, network, why_not

PORT: Final = 7000
HEARD: Final = "import socket, sys; print(socket.create_connection((sys.argv[1], 7000), 1).recv(9))"


@pytest.fixture
def net() -> Iterator[Network]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with network() as made:
        yield made


def serve(host: Host) -> socket.socket:
    with host.entered():
        return socket.create_server((host.address, PORT))


def test_hosts_reach_each_other_by_name(net: Network) -> None:
    first, second = net.add("first"), net.add("second")
    with serve(first) as server:
        command = second.command(sys.executable, "-c", HEARD, "first")
        asking = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        connection, (peer, _) = server.accept()
        with connection:
            connection.sendall(b"hello")
        assert asking.communicate(timeout=10) == ("b'hello'\n", None)
        assert peer == second.address


def test_a_cut_is_silent_and_heals(net: Network) -> None:
    first = net.add("first")
    with serve(first) as server, net.hub.entered():
        ours = socket.create_connection((first.address, PORT), 5)
        theirs, _ = server.accept()
        with ours, theirs:
            net.cut("first")
            theirs.sendall(b"lost, for now")
            ours.settimeout(0.3)
            with pytest.raises(TimeoutError):
                ours.recv(99)
            net.heal("first")
            ours.settimeout(10)
            assert ours.recv(99) == b"lost, for now"


def test_nothing_is_left() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with network() as net:
        host = net.add("first")
    assert not Path("/run/netns", host.namespace).exists()
    assert not Path("/etc/netns", host.namespace).exists()

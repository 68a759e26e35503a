"""Hosts on one machine: a network namespace each, on a bridge, and the network of any can be cut.

The bridge lies in a namespace of its own, so no address here is one that the machine, or another
`Network`, can reach or mistake for its own. Who wants to speak with the hosts enters one, as the
`hub`, which is there from the start. Needs root and iproute2: see `why_not`.

    with network() as net:
        worker = net.add("worker-1")
        subprocess.Popen(worker.command("pagemesh", "worker", "--service-host", worker.address))
        with net.hub.entered():
            requests.get(f"http://{worker.address}:8000/ready")
        net.cut("worker-1")
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

_CLONE_NEWNET: Final = 0x40000000
_NAMESPACES: Final = Path("/run/netns")
# `ip netns exec` lays what it finds here over /etc.
_FILES: Final = Path("/etc/netns")
_SUBNET: Final = "10.77.0"
MAX_HOSTS: Final = 254


class Host(NamedTuple):
    """A namespace with one address, and a loopback of its own. Every host knows the others by their
    names too, for what is started with `command`."""

    name: str
    namespace: str
    address: str

    def command(self, *command: str) -> tuple[str, ...]:
        """`command`, to be run on this host. It becomes the process that is started."""
        return ("ip", "netns", "exec", self.namespace, *command)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Sockets that this thread opens meanwhile, and processes that it starts, are this host's.
        Host names are still the machine's."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _enter(_NAMESPACES / self.namespace)
            try:
                yield
            finally:
                _set_namespace(before)
        finally:
            os.close(before)


class Network:
    """Made by `network`. Owner of its namespaces, not of the processes in them."""

    def __init__(self, prefix: str) -> None:
        self.hosts: dict[str, Host] = {}
        self._prefix = prefix
        self._switch = f"{prefix}-switch"
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        self.hub = self.add("hub")

    def add(self, name: str) -> Host:
        """A new host, linked to all the others. Raises ValueError when there are too many."""
        number = len(self.hosts) + 1
        if number > MAX_HOSTS or name in self.hosts:
            raise ValueError(f"no host {name!r}: {MAX_HOSTS} may be, each name once")
        host = Host(name, f"{self._prefix}-{number}", f"{_SUBNET}.{number}")
        self.hosts[name] = host
        _make_namespace(host)
        link = ("link", "add", _port(host), "type", "veth", "peer", "name", "eth0")
        _ip("-n", self._switch, *link, "netns", host.namespace)
        _ip("-n", self._switch, "link", "set", _port(host), "up")
        _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
        _ip("-n", host.namespace, "link", "set", "eth0", "up")
        self.heal(name)
        self._write_names()
        return host

    def cut(self, name: str) -> None:
        """From now on whatever this host sends, or is sent, is lost: no connection is told."""
        _ip("-n", self._switch, "link", "set", _port(self.hosts[name]), "nomaster")

    def heal(self, name: str) -> None:
        _ip("-n", self._switch, "link", "set", _port(self.hosts[name]), "master", "bridge")

    def remove(self) -> None:
        """End it. What still runs on a host keeps its loopback and reaches nobody."""
        for namespace in (*(host.namespace for host in self.hosts.values()), self._switch):
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", namespace)
            shutil.rmtree(_FILES / namespace, ignore_errors=True)

    def _write_names(self) -> None:
        """In place: a running process sees what is added."""
        named = (f"{host.address} {host.name}" for host in self.hosts.values())
        lines = ["127.0.0.1 localhost", *named]
        for host in self.hosts.values():
            (_FILES / host.namespace / "hosts").write_text("\n".join(lines) + "\n")


@contextmanager
def network() -> Iterator[Network]:
    """A network with no host but its hub. Raises CalledProcessError where `why_not` has a
    reason."""
    made = Network(f"pm-{uuid.uuid4().hex[:8]}")
    try:
        yield made
    finally:
        made.remove()


def why_not() -> str | None:
    """Why there can be no network here; None when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2"
    try:
        with network() as net:
            net.add("probe")
    except (subprocess.CalledProcessError, OSError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"network namespaces are not permitted: {said.strip()}"
    return None


def _make_namespace(host: Host) -> None:
    _ip("netns", "add", host.namespace)
    _ip("-n", host.namespace, "link", "set", "lo", "up")
    folder = _FILES / host.namespace
    folder.mkdir(parents=True)
    (folder / "hosts").write_text("127.0.0.1 localhost\n")


def _port(host: Host) -> str:
    """The bridge's end of a host's link."""
    return f"to-{host.address.rpartition('.')[2]}"


def _ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True, capture_output=True, text=True)


def _enter(namespace: Path) -> None:
    fd = os.open(namespace, os.O_RDONLY)
    try:
        _set_namespace(fd)
    finally:
        os.close(fd)


def _set_namespace(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

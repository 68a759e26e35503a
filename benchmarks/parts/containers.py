"""Compose without a container engine: each container is a network namespace in which its command
runs, with its image's and its own variables, on its own ports, and names as Docker gives them.

What differs: everybody is root and sees this machine's files, volumes are folders of this machine,
and ports are not published: ask at the balancer's address, from the hub.

    with network() as net, composition(net, services, folder) as mesh:
        mesh.up({"gateway": 3})
        with net.hub.entered():
            requests.get(f"http://{mesh.only('balancer').host.address}:8000/ready")
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pagemesh.supervisor import guarded
from parts.compose_files import Service
from parts.container_command import ROOT, ContainerCommand, container_command
from parts.dockerfile import read_targets
from parts.name_server import PORT, NameServer
from parts.netns import Host, Network

HEALTHY_TIMEOUT_S: Final = 180.0
_POLL_S: Final = 0.05
# haproxy's image says that it stops by this one, in its own time.
_STOP_SIGNALS: Final = {"haproxy": signal.SIGUSR1}


class Container:
    """A started container. `log` holds what it wrote."""

    def __init__(self, service: Service, host: Host, what: ContainerCommand, log: Path) -> None:
        self.service = service
        self.host = host
        self.log = log
        self._check = what.health_check
        self._command = host.command(*what.command)
        self._environ = {**what.environment, "PATH": os.environ["PATH"], "HOME": str(Path.home())}
        self._is_over = service.spec.get("restart") == "no"
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("a") as output:
            return subprocess.Popen(
                guarded(self._command),
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    def tend(self) -> None:
        """Start it again if it ended by itself, as `restart: unless-stopped` has it."""
        if not self.runs and not self._is_over:
            self.process = self._start()

    def is_healthy(self) -> bool:
        """What the health check says now; True without one."""
        if not self._check:
            return True
        check = self.host.command(*self._check)
        done = subprocess.run(check, env=self._environ, capture_output=True, check=False)
        return done.returncode == 0

    def wait_done(self) -> None:
        """Raises RuntimeError when a one-shot container fails."""
        if self.process.wait(HEALTHY_TIMEOUT_S) != 0:
            raise RuntimeError(f"{self.host.name} failed:\n{self.log.read_text()}")

    def stop(self) -> int:
        """As `docker stop`: a signal, patience, SIGKILL. The exit code."""
        self._is_over = True
        self.process.send_signal(_STOP_SIGNALS.get(self.service.image, signal.SIGTERM))
        try:
            return self.process.wait(self.service.stop_grace_s)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        self._is_over = True
        self.process.kill()
        return self.process.wait()


class Composition:
    """The containers of some services on a network. Made by `composition`."""

    def __init__(self, net: Network, services: Mapping[str, Service], folder: Path) -> None:
        self.services = services
        self.containers: list[Container] = []
        self._net = net
        self._folder = folder
        self._images = read_targets((ROOT / "deploy/Dockerfile").read_text())
        self._addresses: dict[str, tuple[str, ...]] = {}
        with net.hub.entered():
            self._names = _name_server(net.hub, self._addresses)

    def up(self, scale: Mapping[str, int] | None = None) -> None:
        """Start every service, each after what it depends on, and wait until all are healthy.

        Raises RuntimeError when `prepare` fails, TimeoutError when one is not healthy in time.
        """
        for name in self._order():
            for _ in range((scale or {}).get(name, 1)):
                self.start(name)
        for container in self.containers:
            if container.service.spec.get("restart") != "no":
                self.wait_healthy(container)

    def start(self, name: str) -> Container:
        """One more container of a service, once what it depends on is there."""
        service = self.services[name]
        for other, condition in service.depends_on:
            self._wait_for(other, condition)
        host = self._net.add(f"{name}-{len(self.containers) + 1}")
        resolver = f"nameserver {self._net.hub.address}\noptions timeout:1 attempts:2\n"
        Path("/etc/netns", host.namespace, "resolv.conf").write_text(resolver)
        for volume in service.volumes:
            if volume.is_named:
                (self._folder / volume.source).mkdir(exist_ok=True)
        image = self._images[service.target] if service.target else None
        what = container_command(service, image, self._folder)
        container = Container(service, host, what, self._folder / f"{host.name}.log")
        self.containers.append(container)
        self._announce(name)
        return container

    def stop(self, container: Container) -> int:
        """As `docker stop`; the exit code. Its name goes when it has ended."""
        code = container.stop()
        self._announce(container.service.name)
        return code

    def kill(self, container: Container) -> None:
        """It dies, and its name with it."""
        container.kill()
        self._announce(container.service.name)

    def wait_healthy(self, container: Container) -> None:
        """Raises TimeoutError when it is not in time. Meanwhile all of them are tended."""
        deadline_s = time.monotonic() + HEALTHY_TIMEOUT_S
        while not container.is_healthy():
            if time.monotonic() > deadline_s:
                log = container.log.read_text()
                raise TimeoutError(f"{container.host.name} is not healthy:\n{log}")
            self.tend()
            time.sleep(_POLL_S)

    def tend(self) -> None:
        """Start again what ended by itself."""
        for container in self.containers:
            container.tend()

    def running(self, name: str) -> list[Container]:
        return [each for each in self.containers if each.service.name == name and each.runs]

    def only(self, name: str) -> Container:
        [container] = self.running(name)
        return container

    def down(self) -> dict[str, int]:
        """Stop everything, each before what it depends on; exit codes by name."""
        order = [each for name in reversed(self._order()) for each in self.running(name)]
        return {container.host.name: self.stop(container) for container in order}

    def close(self) -> None:
        for container in self.containers:
            container.kill()
        self._names.close()

    def _order(self) -> list[str]:
        order: list[str] = []

        def visit(name: str) -> None:
            for other, _ in self.services[name].depends_on:
                visit(other)
            if name not in order:
                order.append(name)

        for name in self.services:
            visit(name)
        return order

    def _wait_for(self, name: str, condition: str) -> None:
        for container in [each for each in self.containers if each.service.name == name]:
            if condition == "service_healthy":
                self.wait_healthy(container)
            elif condition == "service_completed_successfully":
                container.wait_done()

    def _announce(self, name: str) -> None:
        # One assignment: the name server reads it in a thread of its own.
        self._addresses[name] = tuple(each.host.address for each in self.running(name))


@contextmanager
def composition(
    net: Network, services: Mapping[str, Service], folder: Path
) -> Iterator[Composition]:
    """Nothing runs yet. Logs and volumes are in `folder`; whatever runs at the end is killed."""
    made = Composition(net, services, folder)
    try:
        yield made
    finally:
        made.close()


def _name_server(hub: Host, addresses: Mapping[str, tuple[str, ...]]) -> NameServer:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind((hub.address, PORT))
    return NameServer(sock, addresses)

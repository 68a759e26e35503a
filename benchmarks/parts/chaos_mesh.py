"""A mesh with several of each service, a host for each process, and everything that may befall it.

Where network namespaces are permitted each process has one (see `netns`), so that its network can
be cut; elsewhere all are on the loopback.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp
import msgspec
import psutil
import redis.asyncio
from redis.exceptions import RedisError

from pagemesh.children import SERVICES, child_names, service_spec
from pagemesh.embedded_valkey import embedded_valkey
from pagemesh.shared.registry import Registry
from pagemesh.shared.settings import Settings
from pagemesh.supervisor import ChildSpec, Supervisor, first
from parts import chaos_worker
from parts.netns import Network
from parts.services import free_port, python_path

REDIS: Final = "redis"
NAME: Final = "CHAOS_NAME"
READY_S: Final = 240.0
# What streams through a gateway must end there.
GATEWAY_DRAIN_S: Final = 20.0
_POLL_S: Final = 0.1
_REDIS_PORT: Final = 6379
_LINK_PORT: Final = 7000
_HTTP_PORT: Final = 8000
_VALKEY: Final = """\
bind {address}
port {port}
protected-mode no
save ""
appendonly no
loglevel warning
"""


class Member(NamedTuple):
    """One process and its successors. `url` is where its health and metrics are."""

    name: str
    service: str
    url: str


class Hosts:
    """Where processes live: a host for each name, or all on the loopback."""

    def __init__(self, net: Network | None) -> None:
        self.net = net

    def place(self, name: str, port: int) -> tuple[str, int]:
        """Address and port for what is called `name`."""
        if self.net is None:
            return "127.0.0.1", free_port()
        return self.net.add(name).address, port

    def command(self, name: str, command: tuple[str, ...]) -> tuple[str, ...]:
        return command if self.net is None else self.net.hosts[name].command(*command)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This process is among them, at the hub."""
        if self.net is None:
            yield
            return
        with self.net.hub.entered():
            yield


class ChaosMesh:
    """A running mesh, and its undoing. Who is killed is started again by the supervisor."""

    def __init__(self, hosts: Hosts, supervisor: Supervisor, redis_url: str) -> None:
        self.members: dict[str, Member] = {}
        self.redis_url = redis_url
        self._hosts = hosts
        self._supervisor = supervisor

    @property
    def can_cut(self) -> bool:
        return self._hosts.net is not None

    def names(self, service: str) -> list[str]:
        return [member.name for member in self.members.values() if member.service == service]

    def urls(self, service: str) -> list[str]:
        return [member.url for member in self.members.values() if member.service == service]

    def start(self, member: Member, spec: ChildSpec) -> None:
        self.members[member.name] = member
        self._start(spec)

    def start_redis(self, spec: ChildSpec) -> None:
        self._start(spec)

    def _start(self, spec: ChildSpec) -> None:
        command = self._hosts.command(spec.name, spec.command)
        environ = {**spec.environ, NAME: spec.name}
        self._supervisor.start(spec._replace(command=command, environ=environ))

    # -- faults -----------------------------------------------------------------------------------

    def processes(self) -> dict[str, psutil.Process]:
        """By name, of the members and Redis; without those that are being started again."""
        found: dict[str, psutil.Process] = {}
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                name = self._name(child)
                if name is not None and child.status() != psutil.STATUS_ZOMBIE:
                    found[name] = child
        return found

    def _name(self, process: psutil.Process) -> str | None:
        name = process.environ().get(NAME)
        if name is None:  # Redis writes its address over its command line and its environment
            title = process.cmdline()[-1].split()
            return REDIS if title and self.redis_url.endswith(title[-1]) else None
        return name

    def send(self, name: str, signum: signal.Signals) -> None:
        """Raises KeyError while there is no such process."""
        self.processes()[name].send_signal(signum)

    def cut(self, name: str) -> None:
        assert self._hosts.net is not None
        self._hosts.net.cut(name)

    def heal(self, name: str) -> None:
        assert self._hosts.net is not None
        self._hosts.net.heal(name)

    async def flush_redis(self) -> None:
        client = redis.asyncio.Redis.from_url(self.redis_url)
        try:
            await client.flushall()
        finally:
            await client.aclose()

    # -- state ------------------------------------------------------------------------------------

    async def until_redis_answers(self, timeout_s: float = READY_S) -> None:
        """Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while await self._not_announced(()):  # noqa: ASYNC110 -- Redis tells no changes
                await asyncio.sleep(_POLL_S)

    async def until_whole(self, timeout_s: float = READY_S) -> None:
        """Return when every process is announced, and ready. Raises TimeoutError that says who is
        missing."""
        missing = "nobody was asked"
        timeout = aiohttp.ClientTimeout(total=1.0)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            try:
                async with asyncio.timeout(timeout_s):
                    while (missing := await self._missing(session)) != "":  # noqa: ASYNC110
                        await asyncio.sleep(_POLL_S)
            except TimeoutError as error:
                raise TimeoutError(f"the mesh is not whole: {missing}") from error

    async def _missing(self, session: aiohttp.ClientSession) -> str:
        asked = (_not_ready(session, member) for member in self.members.values())
        reasons = await asyncio.gather(*asked, self._not_announced())
        return "; ".join(filter(None, reasons))

    async def _not_announced(self, services: Iterable[str] = SERVICES) -> str:
        """Why Redis does not know all of them."""
        registry = Registry(self.redis_url, Settings().mesh.mesh_name)
        try:
            await registry.ping()
            for service in services:
                found = len(await registry.instances(service))
                if found != len(self.names(service)):
                    return f"{found} of {service} are announced"
            return ""
        except (RedisError, OSError) as error:
            return f"redis: {error}"
        finally:
            await registry.close()


async def _not_ready(session: aiohttp.ClientSession, member: Member) -> str:
    try:
        async with session.get(f"{member.url}/ready") as answer:
            return "" if answer.status == 200 else f"{member.name}: {await answer.text()}"
    except (OSError, aiohttp.ClientError, TimeoutError) as error:
        return f"{member.name}: {error}"


@asynccontextmanager
async def chaos_mesh(
    settings: Settings, net: Network | None, log: Path, *, step_s: float | None
) -> AsyncIterator[ChaosMesh]:
    """As many of each service as `settings.mesh` says, ready. A step takes `step_s`, of a scripted
    worker; None: the real one. What the processes log goes to `log`.

    To be called on a host of `net`. The prepared folder of the model must exist.
    """
    hosts = Hosts(net)
    address, port = hosts.place(REDIS, _REDIS_PORT)
    redis_url = f"redis://{address}:{port}"
    mesh_settings = msgspec.structs.replace(settings.mesh, redis_url=redis_url)
    settings = msgspec.structs.replace(settings, mesh=mesh_settings)
    with log.open("w", buffering=1) as file, embedded_valkey() as valkey:
        supervisor = Supervisor(lambda name, line: print(f"{name} | {line}", file=file))
        mesh = ChaosMesh(hosts, supervisor, redis_url)
        config = _VALKEY.format(address=address, port=port).encode()
        mesh.start_redis(valkey.spec._replace(name=REDIS, config=config))
        try:
            await first(supervisor.watch(), mesh.until_redis_answers())
            for service in SERVICES:
                for name in child_names(service, settings):
                    mesh.start(*_member(hosts, settings, service, name, step_s))
            await first(supervisor.watch(), mesh.until_whole())
            supervisor.mark_ready()
            yield mesh
        finally:
            await supervisor.stop(GATEWAY_DRAIN_S)


def _member(
    hosts: Hosts, settings: Settings, service: str, name: str, step_s: float | None
) -> tuple[Member, ChildSpec]:
    is_gateway = service == "gateway"
    address, port = hosts.place(name, _HTTP_PORT if is_gateway else _LINK_PORT)
    # Each gateway has an address of its own here, so none shares a port.
    drain_s = GATEWAY_DRAIN_S if is_gateway else settings.mesh.drain_timeout_s
    mesh = msgspec.structs.replace(
        settings.mesh,
        service_host=address,
        service_port=port,
        gateways=1,
        drain_timeout_s=drain_s,
    )
    gateway = msgspec.structs.replace(settings.gateway, host=address, port=port)
    own = msgspec.structs.replace(settings, mesh=mesh, gateway=gateway)
    spec = service_spec(service, own)._replace(name=name)
    if service == "worker" and step_s is not None:
        command = (sys.executable, "-m", "parts.chaos_worker", service)
        environ = {"PYTHONPATH": python_path(), chaos_worker.STEP_S: str(step_s)}
        spec = spec._replace(command=command, environ={**spec.environ, **environ})
    return Member(name, service, f"http://{address}:{port}"), spec

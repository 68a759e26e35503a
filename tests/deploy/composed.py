"""compose.yaml with its containers as network namespaces, and what the tests ask of it."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import requests
from metric_names import Scrape
from openai import OpenAI

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from parts.compose_files import read_services
from parts.container_command import ROOT
from parts.containers import Composition, composition
from parts.netns import network, why_not

KEY: Final = "key-of-the-clients"
SECRETS: Final = {"PAGEMESH_MESH_SECRET": "secret-of-the-mesh", "PAGEMESH_API_KEY": KEY}
PROMPT: Final = "a page table maps"
ENGINES: Final = "vllm:num_requests_running"
TIMEOUT_S: Final = 180.0
_POLL_S: Final = 0.1


def why_no_containers() -> str | None:
    """Why compose.yaml cannot be shown here; None when it can."""
    if shutil.which("haproxy") is None:
        return "the balancer of compose.yaml needs haproxy (on Debian: apt-get install haproxy)"
    return why_not()


class Mesh:
    """What a client on the same network has: the address of the balancer, and the key."""

    def __init__(self, containers: Composition) -> None:
        self.containers = containers
        self.balancer = containers.only("balancer").host.address
        # No retries: what the balancer does not hide, nothing hides.
        self.client = OpenAI(
            base_url=f"http://{self.balancer}:8000/v1",
            api_key=KEY,
            max_retries=0,
            timeout=TIMEOUT_S,
        )

    def complete(self) -> str:
        answer = self.client.completions.create(
            model=self.model, prompt=PROMPT, max_tokens=8, temperature=0
        )
        return answer.choices[0].text

    def stream(self, model: str) -> str:
        stream = self.client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "What is a page table?"}],
            max_tokens=24,
            temperature=0,
            stream=True,
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

    def in_flight_after_first_token(self) -> float:
        """Requests that the gateways still work on when the first token of a long stream is here:
        none if somebody on the way collects what passes."""
        stream = self.client.completions.create(
            model=self.model, prompt=PROMPT, max_tokens=400, stream=True
        )
        with stream:
            next(iter(stream))
            gateways = self.containers.running("gateway")
            scrapes = [self._scrape(each.host.address, 8000) for each in gateways]
        return sum(scrape.total("pagemesh_requests_in_flight") for scrape in scrapes)

    @property
    def model(self) -> str:
        return self.client.models.list().data[0].id

    def gateways_in_use(self) -> float:
        return self._scrape(self.balancer, 8404).total(
            "haproxy_backend_active_servers", proxy="gateways"
        )

    def engines(self) -> int:
        """As the first gateway sees them."""
        gateway = self.containers.running("gateway")[0]
        scrape = self._scrape(gateway.host.address, 8000)
        return len({labels["engine"] for name, labels, _ in scrape.samples if name == ENGINES})

    def answered(self, gateway: str) -> float:
        """Completions that a gateway has answered."""
        scrape = self._scrape(gateway, 8000)
        return scrape.total("http_requests_total", handler="/v1/completions", code="200")

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Meanwhile containers that end by themselves are started again."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline_s, f"not within {TIMEOUT_S} s"
            self.containers.tend()
            time.sleep(_POLL_S)

    def _scrape(self, address: str, port: int) -> Scrape:
        return Scrape.of(requests.get(f"http://{address}:{port}/metrics", timeout=10).text)


@contextmanager
def composed_mesh(
    folder: Path, environ: dict[str, str], *files: str, scale: dict[str, int] | None = None
) -> Iterator[Mesh]:
    """Every service of compose.yaml and `files`, healthy; this thread is on their network."""
    paths = [ROOT / name for name in ("compose.yaml", *files)]
    services = read_services(paths, {**SECRETS, **environ})
    with network() as net, composition(net, services, folder) as containers:
        containers.up(scale)
        with net.hub.entered():
            mesh = Mesh(containers)
            mesh.wait_for(lambda: mesh.gateways_in_use() == len(containers.running("gateway")))
            yield mesh

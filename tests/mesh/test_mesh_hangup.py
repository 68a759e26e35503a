"""A client that hangs up stops its computation and gives its memory back."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
import requests
from mesh_process import MeshProcess, wait_until

pytestmark = pytest.mark.mesh
# Figures come from the worker's side to the gateway five times a second.
FREED_S: Final = 3.0
ENDLESS: Final[dict[str, Any]] = {
    "model": "smollm2-135m-instruct",
    "prompt": "Once upon a time there was a page table",
    "temperature": 0,
    "max_tokens": 1900,
    "ignore_eos": True,
}


def gauge(mesh: MeshProcess, name: str) -> float:
    """The sum of a gauge over the engines, as the gateway shows it."""
    text = requests.get(f"{mesh.base_url}/metrics", timeout=10).text
    return sum(map(float, re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE)))


def busy(mesh: MeshProcess) -> float:
    return gauge(mesh, "vllm:num_requests_running") + gauge(mesh, "vllm:num_requests_waiting")


@contextmanager
def asking(mesh: MeshProcess, **fields: Any) -> Iterator[None]:
    """A client that asks for ENDLESS, reads nothing, and hangs up when the block ends."""
    host = urlsplit(mesh.base_url)
    body = json.dumps({**ENDLESS, **fields})
    with socket.create_connection((host.hostname or "", host.port or 0)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host.netloc}\r\n"
        fields_of_head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(f"{head}{fields_of_head}{body}".encode())
        yield


@pytest.mark.parametrize("stream", [True, False])
def test_a_hang_up_frees_the_engine(mesh: MeshProcess, stream: bool) -> None:
    wait_until(lambda: busy(mesh) == 0, FREED_S)
    with asking(mesh, stream=stream, n=2):
        wait_until(lambda: gauge(mesh, "vllm:num_requests_running") == 2, 10)
        assert gauge(mesh, "vllm:gpu_cache_usage_perc") > 0
    wait_until(lambda: busy(mesh) == 0, FREED_S)
    wait_until(lambda: gauge(mesh, "vllm:gpu_cache_usage_perc") == 0, FREED_S)

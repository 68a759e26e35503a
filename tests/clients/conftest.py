"""The released openai client before the shared mesh. What `make test` runs here comes with the
development environment."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from mesh_process import MeshProcess

# Clients with an environment of their own: `make test-clients`.
collect_ignore = ["apart"]


@pytest.fixture
def client(mesh: MeshProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{mesh.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from worker_harness import tiny_decoder

from pagemesh.worker_svc.models.decoder import Decoder


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from a second thread, and lose much when another core is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def decoder() -> Decoder:
    return tiny_decoder()

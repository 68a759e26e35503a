"""What int8 weights cost: the real model's next-token distributions over a set of texts.

Measured on SmolLM2-135M-Instruct, 4988 positions: see the bounds below.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from paged_driver import PagedDriver
from tokenizers import Tokenizer
from torch import Tensor

from pagemesh.kernels.cpu.team import Team
from pagemesh.shared.prepared import load_prepared
from pagemesh.worker_svc.loader import load_decoder
from pagemesh.worker_svc.models.cpu_decoder import CPUDecoder

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

PASSAGES = Path(__file__).with_name("passages.txt").read_text("utf-8").split("\n---\n")
# Measured: 0.0056 nats, 94.5 %, 0.0015 nats.
MOST_MEAN_KL = 0.0085
LEAST_AGREEMENT = 0.92
MOST_LOSS_MORE = 0.01


@pytest.fixture(scope="module")
def ids(smollm2_folder: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    return [encoding.ids for encoding in tokenizer.encode_batch(PASSAGES)]


@pytest.fixture(scope="module")
def log_probabilities(smollm2_folder: Path, ids: list[list[int]]) -> tuple[Tensor, Tensor]:
    """float32[positions, vocab] of the model in bfloat16, and of the same model kept as int8."""
    prepared = load_prepared(smollm2_folder)
    decoder = load_decoder(smollm2_folder, prepared, dtype=torch.bfloat16, device="cpu")
    team = Team(2)
    models = (
        CPUDecoder(copy.deepcopy(decoder), team, dtype=torch.bfloat16),
        CPUDecoder(decoder, team, dtype=torch.int8),
    )
    wide, narrow = (torch.cat([_log_softmax(model, one) for one in ids]) for model in models)
    return wide, narrow


def _log_softmax(model: CPUDecoder, ids: list[int]) -> Tensor:
    driver = PagedDriver(model, block_tokens=16, num_blocks=32, dtype=torch.bfloat16)
    return driver.step({"text": ids})["text"].log_softmax(-1)


def loss(log_probabilities: Tensor, ids: list[list[int]]) -> Tensor:
    """Mean -log p of each text's next token."""
    parts = log_probabilities.split([len(one) for one in ids])
    chosen = [
        part[:-1].gather(1, torch.tensor(one[1:])[:, None])
        for part, one in zip(parts, ids, strict=True)
    ]
    return -torch.cat(chosen).mean()


def test_kl_agreement_and_loss(
    log_probabilities: tuple[Tensor, Tensor], ids: list[list[int]]
) -> None:
    wide, narrow = log_probabilities
    kl = (wide.exp() * (wide - narrow)).sum(-1).mean().item()
    agreement = (wide.argmax(-1) == narrow.argmax(-1)).float().mean().item()
    more = (loss(narrow, ids) - loss(wide, ids)).item()
    print(f"int8: mean KL {kl:.5f}, top-1 agreement {agreement:.4f}, loss {more:+.5f}")
    assert kl < MOST_MEAN_KL
    assert agreement > LEAST_AGREEMENT
    assert more < MOST_LOSS_MORE


def test_weights_take_half_the_memory(smollm2_folder: Path) -> None:
    prepared = load_prepared(smollm2_folder)
    decoder = load_decoder(smollm2_folder, prepared, dtype=torch.bfloat16, device="cpu")
    wide = CPUDecoder(copy.deepcopy(decoder), Team(1), dtype=torch.bfloat16)
    narrow = CPUDecoder(decoder, Team(1), dtype=torch.int8)
    assert narrow.weights_bytes < 0.52 * wide.weights_bytes

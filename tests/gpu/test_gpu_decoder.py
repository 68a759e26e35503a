"""The decoder of Triton kernels against the torch reference, over a mixed paged batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pagemesh.kernels.inputs import AttentionInputs
from pagemesh.worker_svc.gpu.decoder import GPUDecoder
from pagemesh.worker_svc.kv_cache import KVCache
from pagemesh.worker_svc.models.config import DecoderConfig
from pagemesh.worker_svc.models.decoder import Decoder

BLOCK_TOKENS, NUM_BLOCKS = 16, 24
SIZES = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    "qwen2-biases": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3-norms": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False},
    "mistral-window": {"architectures": ["MistralForCausalLM"], "sliding_window": 9},
}
# (query tokens, context tokens, blocks), decodes first; what is between them is the past.
STEPS = [
    [(20, 20, [3, 7]), (2, 2, [5])],
    [(1, 21, [3, 7]), (1, 3, [5]), (18, 18, [9, 2])],
]


def random_decoder(family: str, dtype: torch.dtype, device: str) -> Decoder:
    config = DecoderConfig.from_dict(SIZES | FAMILIES[family])
    decoder = Decoder(config, dtype=dtype, device="cpu")
    rng = torch.Generator().manual_seed(3)
    for name, weight in decoder.named_parameters():
        mean = 1.0 if "norm" in name else 0.0
        weight.copy_(torch.randn(weight.shape, generator=rng) * 0.15 + mean)
    return decoder.to(device)


def inputs_of(rows: list[tuple[int, int, list[int]]], device: str) -> tuple[Tensor, Any]:
    """int64 positions, and what attention must know."""
    positions = [p for n, context, _ in rows for p in range(context - n, context)]
    places = [
        table[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS
        for n, context, table in rows
        for p in range(context - n, context)
    ]
    tables = torch.zeros(len(rows), 4, dtype=torch.int32)
    for row, (_, _, table) in enumerate(rows):
        tables[row, : len(table)] = torch.tensor(table)
    starts = torch.tensor([0, *(n for n, _, _ in rows)]).cumsum(0).to(torch.int32)
    return torch.tensor(positions, device=device), AttentionInputs(
        query_start=starts.to(device),
        seq_lens=torch.tensor([c for _, c, _ in rows], dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        slot_mapping=torch.tensor(places, device=device),
        max_query_tokens=max(n for n, _, _ in rows),
        max_seq_tokens=max(c for _, c, _ in rows),
        n_decode=sum(n == 1 for n, _, _ in rows),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_reference(family: str, dtype: torch.dtype, device: str) -> None:
    decoder = random_decoder(family, dtype, device)
    config = decoder.config
    pools = [KVCache(config, NUM_BLOCKS, BLOCK_TOKENS, dtype, device) for _ in range(2)]
    twin = GPUDecoder(decoder, config.max_position_tokens)
    rng = torch.Generator().manual_seed(9)
    for rows in STEPS:
        positions, attention = inputs_of(rows, device)
        ids = torch.randint(0, 200, (len(positions),), generator=rng).to(device)
        hidden = decoder.forward(ids, positions, attention, pools[0])
        expected = decoder.logits(hidden)
        positions, attention = inputs_of(rows, device)
        out = torch.full_like(expected, torch.nan, dtype=dtype)
        found = twin.logits(twin.forward(ids, positions, attention, pools[1]), out=out)
        assert found is out
        error = (found.float() - expected).norm() / expected.norm()
        assert error < (1e-5 if dtype == torch.float32 else 2e-2)

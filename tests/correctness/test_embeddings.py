"""The embeddings of the real model are the hidden states of transformers, pooled the same way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from greedy import Ids

from pagemesh import LLM, EmbeddingRequestOutput, PoolingParams
from pagemesh.shared.pooling import Pooling

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def states(hf_model: Any, prompt_ids: Ids) -> dict[str, torch.Tensor]:
    """[T, H] behind the last norm, of some prompts of all lengths."""
    names = sorted(prompt_ids, key=lambda name: len(prompt_ids[name]))[::3]
    with torch.inference_mode():
        return {
            name: hf_model.model(torch.tensor([prompt_ids[name]])).last_hidden_state[0]
            for name in names
        }


def check(
    outputs: list[EmbeddingRequestOutput], states: dict[str, torch.Tensor], pooling: Pooling
) -> None:
    for output, state in zip(outputs, states.values(), strict=True):
        expected = state.mean(0) if pooling == "mean" else state[-1]
        expected = expected / expected.norm()
        got = torch.tensor(output.outputs.embedding)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def test_equal_transformers_in_a_batch_in_chunks_and_cached(
    make_llm: Any, prompt_ids: Ids, states: dict[str, torch.Tensor]
) -> None:
    llm: LLM = make_llm(max_num_batched_tokens=48, block_size=16)
    prompts: list[Any] = [{"prompt_token_ids": prompt_ids[name]} for name in states]
    mean, last = PoolingParams(), PoolingParams(pooling="last")
    check(llm.embed(prompts, mean), states, "mean")
    check(llm.embed(prompts, last), states, "last")
    again = llm.embed(prompts, last)
    check(again, states, "last")
    assert sum(output.num_cached_tokens for output in again) > 0
    filled = llm.embed(prompts, mean)
    check(filled, states, "mean")
    assert sum(output.num_cached_tokens for output in filled) == 0

"""Logprobs of prompts and answers equal transformers' log_softmax, cached prefix or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pagemesh import LLM, Logprob, RequestOutput, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

TOLERANCE = 2e-3
TOP = 3


def log_softmax(model: Any, ids: list[int]) -> Tensor:
    """float32[len(ids), vocab] of transformers, of the id after each position."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([ids])).logits[0]
    return logits.log_softmax(-1)


def check_entry(entry: dict[int, Logprob], expected: Tensor, chosen: int) -> None:
    """One position: the chosen id and the TOP best, each with its value and rank."""
    best = expected.topk(TOP).indices.tolist()
    assert set(entry) == {chosen, *best}
    assert next(iter(entry)) == chosen
    for token_id, one in entry.items():
        assert one.logprob == pytest.approx(float(expected[token_id]), abs=TOLERANCE)
        assert one.rank == int((expected > expected[token_id]).sum()) + 1


@pytest.mark.parametrize("name", ["python", "japanese", "chat turns"])
def test_answer_logprobs(
    llm: LLM, hf_model: Any, prompt_ids: dict[str, list[int]], name: str
) -> None:
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=12, logprobs=TOP, ignore_eos=True)
    prompt = prompt_ids[name]
    (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    (choice,) = output.outputs
    expected = log_softmax(hf_model, prompt + choice.token_ids)[len(prompt) - 1 : -1]
    assert choice.logprobs is not None
    for entry, row, chosen in zip(choice.logprobs, expected, choice.token_ids, strict=True):
        check_entry(entry, row, chosen)
    total = sum(float(row[i]) for row, i in zip(expected, choice.token_ids, strict=True))
    assert choice.cumulative_logprob == pytest.approx(total, abs=TOLERANCE * len(expected))


def test_prompt_logprobs_cold_cached_and_chunked(
    make_llm: Callable[..., LLM], hf_model: Any, prompt_ids: dict[str, list[int]]
) -> None:
    prompt = prompt_ids["long"][:90]
    expected = log_softmax(hf_model, prompt)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=TOP)
    plain = SamplingParams(temperature=0, max_tokens=1)
    llm = make_llm(max_num_batched_tokens=29)

    def generate(params: SamplingParams) -> RequestOutput:
        return llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]

    cold = generate(params)
    assert generate(plain).num_cached_tokens > 0
    warm = generate(params)
    for output in (cold, warm):
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        entries = [entry or {} for entry in output.prompt_logprobs[1:]]
        for entry, row, chosen in zip(entries, expected[:-1], prompt[1:], strict=True):
            check_entry(entry, row, chosen)

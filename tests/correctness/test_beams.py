"""Beam search on shared pages finds what transformers finds on the real model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from greedy import Ids

from pagemesh import LLM

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]
WIDTH = 3
N_TOKENS = 10
N_PROMPTS = 3


def transformers_beams(
    model: Any, ids: list[int], penalty: float, ends: list[int]
) -> list[tuple[list[int], float]]:
    """Generated ids up to the end, and the score, of each beam."""
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            num_beams=WIDTH,
            num_return_sequences=WIDTH,
            do_sample=False,
            max_new_tokens=N_TOKENS,
            length_penalty=penalty,
            eos_token_id=ends or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    rows = [row[len(ids) :].tolist() for row in found.sequences]
    return list(zip((cut(row, ends) for row in rows), found.sequences_scores.tolist(), strict=True))


def cut(row: list[int], ends: list[int]) -> list[int]:
    ended = [place for place, token in enumerate(row) if token in ends]
    return row[: ended[0] + 1] if ended else row


@pytest.mark.parametrize(("penalty", "n_liked"), [(1.0, 0), (0.3, 2)])
def test_equal_transformers(
    llm: LLM,
    hf_model: Any,
    prompt_ids: Ids,
    monkeypatch: pytest.MonkeyPatch,
    penalty: float,
    n_liked: int,
) -> None:
    """Tokens that the model likes are made its ends, so that beams end at all lengths."""
    prompts = sorted(prompt_ids.values(), key=len)[:N_PROMPTS]
    given: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
    liked = Counter(
        token
        for output in llm.beam_search(given, WIDTH, N_TOKENS)
        for choice in output.outputs
        for token in choice.token_ids
    )
    ends = [*llm.card.eos_token_ids, *(token for token, _ in liked.most_common(n_liked))]
    card = llm.card._replace(eos_token_ids=ends)
    monkeypatch.setattr(LLM, "card", property(lambda _: card))
    found = llm.beam_search(given, WIDTH, N_TOKENS, length_penalty=penalty)
    reasons = {choice.finish_reason for output in found for choice in output.outputs}
    assert ("stop" in reasons) == (n_liked > 0)
    for ids, output in zip(prompts, found, strict=True):
        wanted = transformers_beams(hf_model, ids, penalty, ends)
        assert [choice.token_ids for choice in output.outputs] == [ids for ids, _ in wanted]
        for choice, (_, score) in zip(output.outputs, wanted, strict=True):
            logprob = score * len(choice.token_ids) ** penalty
            assert choice.cumulative_logprob == pytest.approx(logprob, abs=1e-3)

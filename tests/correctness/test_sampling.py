"""Seeds, choices and stop strings of the real model."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagemesh import LLM, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

Ids = dict[str, list[int]]


def sample(llm: LLM, prompts: list[str], **params: object) -> list[list[list[int]]]:
    """Ids of each choice of each prompt."""
    usual = {"temperature": 1.0, "max_tokens": 16, "ignore_eos": True}
    outputs = llm.generate(prompts, SamplingParams(**{**usual, **params}), use_tqdm=False)  # type: ignore[arg-type]
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


def test_two_choices_are_distinct_and_reproducible(llm: LLM, make_llm: Callable[..., LLM]) -> None:
    ((first, second),) = sample(llm, ["Once upon a time"], n=2, seed=42)
    assert first != second
    other = make_llm(max_num_batched_tokens=23, run_ahead_depth=3, enable_prefix_caching=False)
    assert sample(other, ["Once upon a time"], n=2, seed=42) == [[first, second]]
    assert sample(llm, ["Once upon a time"], seed=42) == [[first]]


def test_seeded_answer_does_not_depend_on_the_batch(llm: LLM) -> None:
    alone = sample(llm, ["My favourite"], seed=9, top_p=0.9, top_k=50)
    crowd = ["My favourite", *(f"Story number {i}:" for i in range(7))]
    assert sample(llm, crowd, seed=9, top_p=0.9, top_k=50)[:1] == alone


def test_another_seed_is_another_answer(llm: LLM) -> None:
    assert sample(llm, ["My favourite"], seed=1) != sample(llm, ["My favourite"], seed=2)


def test_stop_string_over_several_tokens(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    (free,) = llm.generate("The capital of France is", greedy, use_tqdm=False)
    text = free.outputs[0].text
    stop = text[9:16]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=["zzz", stop])
    (output,) = llm.generate("The capital of France is", params, use_tqdm=False)
    (choice,) = output.outputs
    assert choice.text == text[: text.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


def test_chat_ends_by_itself(llm: LLM) -> None:
    talk = [{"role": "user", "content": "Answer with one word: what is the capital of France?"}]
    params = SamplingParams(temperature=0, max_tokens=64)
    (output,) = llm.chat(talk, params, use_tqdm=False)
    (choice,) = output.outputs
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
    assert choice.token_ids[-1] == 2
    assert "Paris" in choice.text
    assert "<|im_end|>" not in choice.text

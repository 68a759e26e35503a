"""Greedy ids equal transformers' for every prompt, however the work is cut into steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from pagemesh import LLM, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

Ids = dict[str, list[int]]
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


def generate(llm: LLM, prompt_ids: Ids, names: Iterable[str]) -> Ids:
    names = list(names)
    prompts = [{"prompt_token_ids": prompt_ids[name]} for name in names]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)  # type: ignore[arg-type]
    return {name: output.outputs[0].token_ids for name, output in zip(names, outputs, strict=True)}


def test_each_prompt_alone(llm: LLM, prompt_ids: Ids, reference: Ids) -> None:
    for name in prompt_ids:
        assert generate(llm, prompt_ids, [name]) == {name: reference[name]}


def test_batches_of_eight(llm: LLM, prompt_ids: Ids, reference: Ids) -> None:
    names = list(prompt_ids)
    for start in range(0, len(names), 8):
        batch = names[start : start + 8]
        assert generate(llm, prompt_ids, batch) == {name: reference[name] for name in batch}


def test_after_a_prefix_hit(make_llm: Callable[..., LLM], prompt_ids: Ids, reference: Ids) -> None:
    """The second round finds the prompts and most of the answers of the first in the cache."""
    llm = make_llm()
    cold, warm = (generate(llm, prompt_ids, prompt_ids) for _ in range(2))
    assert llm._loop.stats.prefix_hit_tokens_total > 0
    assert cold == reference
    assert warm == reference
    grown = {name: prompt_ids[name] + reference[name][:40] for name in prompt_ids}
    rest = generate(llm, grown, grown)
    assert {name: ids[:24] for name, ids in rest.items()} == {
        name: ids[40:] for name, ids in reference.items()
    }


def test_after_preemption(make_llm: Callable[..., LLM], prompt_ids: Ids, reference: Ids) -> None:
    llm = make_llm(kv_cache_memory="24MiB")
    assert generate(llm, prompt_ids, prompt_ids) == reference
    assert llm._loop.stats.preemptions_total > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 37, "run_ahead_depth": 1},
        {"max_num_batched_tokens": 101, "run_ahead_depth": 3, "block_size": 5},
        {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": 320,
            "enable_prefix_caching": False,
        },
    ],
    ids=lambda settings: ", ".join(f"{key}={value}" for key, value in settings.items()),
)
def test_under_other_settings(
    make_llm: Callable[..., LLM], prompt_ids: Ids, reference: Ids, settings: dict[str, Any]
) -> None:
    assert generate(make_llm(**settings), prompt_ids, prompt_ids) == reference

"""Greedy ids equal transformers' for every prompt, however the work is cut into steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from greedy import Ids, greedy_ids

from pagemesh import LLM

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]


def test_prompts_alone(llm: LLM, prompt_ids: Ids, reference: Ids) -> None:
    """Every other one: each was alone in transformers, and is among others below."""
    for name in list(prompt_ids)[::2]:
        assert greedy_ids(llm, prompt_ids, [name]) == {name: reference[name]}


def test_batches_of_eight(llm: LLM, prompt_ids: Ids, reference: Ids) -> None:
    names = list(prompt_ids)
    for start in range(0, len(names), 8):
        batch = names[start : start + 8]
        assert greedy_ids(llm, prompt_ids, batch) == {name: reference[name] for name in batch}


def test_after_a_prefix_hit(make_llm: Callable[..., LLM], prompt_ids: Ids, reference: Ids) -> None:
    """The second round finds the prompts of the first in the cache, the third answers as well."""
    llm = make_llm()
    greedy_ids(llm, prompt_ids, prompt_ids, max_tokens=1)
    assert greedy_ids(llm, prompt_ids, prompt_ids) == reference
    grown = {name: ids + reference[name][:40] for name, ids in prompt_ids.items()}
    hits_before = llm._loop.stats.prefix_hit_tokens_total
    assert hits_before > 0
    rest = greedy_ids(llm, grown, grown, max_tokens=24)
    assert rest == {name: ids[40:] for name, ids in reference.items()}
    assert llm._loop.stats.prefix_hit_tokens_total > hits_before


def test_after_preemption(make_llm: Callable[..., LLM], prompt_ids: Ids, reference: Ids) -> None:
    llm = make_llm(kv_cache_memory="32MiB")
    assert greedy_ids(llm, prompt_ids, prompt_ids) == reference
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
    assert greedy_ids(make_llm(**settings), prompt_ids, prompt_ids) == reference

"""In bfloat16 too, where near ties are common, answers do not depend on how they are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from greedy import Ids, greedy_ids

from pagemesh import LLM, RequestOutput, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

N_TOKENS = 16
SETTINGS: list[dict[str, Any]] = [
    {"max_num_batched_tokens": 19, "run_ahead_depth": 1, "threads": 1, "block_size": 16},
    {"max_num_batched_tokens": 101, "block_size": 5, "threads": 3},
    {"enable_prefix_caching": False, "block_size": 128},
]


@pytest.fixture(scope="module", params=["bfloat16", "int8"])
def make(request: pytest.FixtureRequest, make_llm: Callable[..., LLM]) -> Callable[..., LLM]:
    quantization = "int8" if request.param == "int8" else "none"
    return lambda **settings: make_llm(dtype="bfloat16", quantization=quantization, **settings)


@pytest.fixture(scope="module")
def plain(make: Callable[..., LLM]) -> LLM:
    return make()


@pytest.fixture(scope="module")
def alone(plain: LLM, prompt_ids: Ids) -> Ids:
    """The answer to each prompt when nothing else runs and nothing is cached."""
    return {name: greedy_ids(plain, prompt_ids, [name], N_TOKENS)[name] for name in prompt_ids}


def test_in_one_batch_and_from_the_cache(plain: LLM, prompt_ids: Ids, alone: Ids) -> None:
    hits_before = plain._loop.stats.prefix_hit_tokens_total
    assert greedy_ids(plain, prompt_ids, prompt_ids, N_TOKENS) == alone
    assert plain._loop.stats.prefix_hit_tokens_total > hits_before


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_under_other_settings(
    make: Callable[..., LLM], prompt_ids: Ids, alone: Ids, settings: dict[str, Any]
) -> None:
    llm = make(**settings)
    assert greedy_ids(llm, prompt_ids, prompt_ids, N_TOKENS) == alone
    assert greedy_ids(llm, prompt_ids, prompt_ids, N_TOKENS) == alone


def test_after_preemption(make: Callable[..., LLM], prompt_ids: Ids, alone: Ids) -> None:
    llm = make(kv_cache_memory="16MiB")
    assert greedy_ids(llm, prompt_ids, prompt_ids, N_TOKENS) == alone
    assert llm._loop.stats.preemptions_total > 0


def test_logprobs_are_the_same_to_the_bit(
    plain: LLM, make: Callable[..., LLM], prompt_ids: Ids
) -> None:
    """Of prompt and answer: cold in one chunk, warm, in chunks among others."""
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=3, prompt_logprobs=3)
    prompt = prompt_ids["long"][:90]

    def logprobs(llm: LLM, *others: list[int]) -> tuple[object, ...]:
        prompts = [{"prompt_token_ids": ids} for ids in (prompt, *others)]
        output: RequestOutput = llm.generate(prompts, params, use_tqdm=False)[0]
        return output.prompt_logprobs, output.outputs[0].logprobs

    expected = logprobs(plain)
    assert expected[0] is not None
    assert expected[1] is not None
    chunked = make(max_num_batched_tokens=23)
    others = list(prompt_ids.values())
    assert logprobs(chunked, *others) == expected
    assert logprobs(chunked, *others) == expected

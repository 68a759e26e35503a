"""The real model on a card: its greedy ids are the CPU's, however the work is cut into steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from greedy import Ids, greedy_ids

from pagemesh import LLM, PoolingParams, RequestOutput, SamplingParams
from pagemesh.outputs import Logprob
from pagemesh.shared.pooling import Pooling

pytestmark = [pytest.mark.gpu, pytest.mark.model, pytest.mark.timeout(600)]

MAX_MODEL_LEN = 320
# A pool for about a third of the twenty requests.
FEW_BLOCKS = 90
# In bfloat16 the card's next token may be another only where the CPU's is as good within this, in
# nats: logits of 10 to 20 have steps of 1/16 there.
TIE = 0.25


@pytest.fixture(autouse=True)
def emptied() -> Iterator[None]:
    """Engines of a test give their memory back."""
    yield
    torch.cuda.empty_cache()


def on_card(**settings: Any) -> LLM:
    usual = {
        "device": "cuda",
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 64,
        "kv_cache_memory": "2GiB",
    }
    return LLM(**{**usual, **settings})


@pytest.fixture(scope="module")
def expected(make_llm: Callable[..., LLM], prompt_ids: Ids) -> Ids:
    """Of the CPU in float32, which tests/correctness/test_greedy.py holds against transformers."""
    return greedy_ids(make_llm(), prompt_ids, prompt_ids)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enforce_eager": True},
        {"run_ahead_depth": 1},
        {"run_ahead_depth": 3, "block_size": 32},
        {"max_num_batched_tokens": 37},
        {"enable_prefix_caching": False, "block_size": 128},
    ],
    ids=lambda settings: ", ".join(f"{key}={value}" for key, value in settings.items()),
)
def test_float32_under_settings(prompt_ids: Ids, expected: Ids, settings: dict[str, Any]) -> None:
    assert greedy_ids(on_card(**settings), prompt_ids, prompt_ids) == expected


def test_float32_in_batches_warm_and_resumed(prompt_ids: Ids, expected: Ids) -> None:
    llm, names = on_card(), list(prompt_ids)
    for size in (1, 8):
        for start in range(0, len(names), size):
            batch = names[start : start + size]
            assert greedy_ids(llm, prompt_ids, batch) == {name: expected[name] for name in batch}
    assert llm._loop.stats.prefix_hit_tokens_total > 0
    grown = {name: ids + expected[name][:40] for name, ids in prompt_ids.items()}
    rest = greedy_ids(llm, grown, grown, max_tokens=24)
    assert rest == {name: ids[40:] for name, ids in expected.items()}


def test_float32_sixty_four_at_once(prompt_ids: Ids, expected: Ids) -> None:
    copies = {f"{name} {n}": ids for n in range(4) for name, ids in prompt_ids.items()}
    copies = dict(list(copies.items())[:64])
    found = greedy_ids(on_card(), copies, copies)
    assert found == {name: expected[name.rsplit(" ", 1)[0]] for name in copies}


def test_float32_after_preemption(prompt_ids: Ids, expected: Ids) -> None:
    probe = on_card()
    block_bytes = 16 * probe._loop._runner.capacity.kv_bytes_per_token
    llm = on_card(kv_cache_memory=str(FEW_BLOCKS * block_bytes))
    assert greedy_ids(llm, prompt_ids, prompt_ids) == expected
    assert llm._loop.stats.preemptions_total > 0


def test_bfloat16_differs_only_in_ties(prompt_ids: Ids, expected: Ids) -> None:
    """The CPU's answers are scored on the card: at each position the card's best token is the CPU's
    or as good by the CPU's own float32 logprobs."""
    whole = {name: ids + expected[name] for name, ids in prompt_ids.items()}
    scores = [scored(llm, whole) for llm in (on_card(dtype="bfloat16"), on_card())]
    total = other = 0
    for name, ids in prompt_ids.items():
        card, exact = (of[name] for of in scores)
        for position in range(len(ids), len(whole[name])):
            best, wanted = top(card[position]), whole[name][position]
            total += 1
            if best != wanted:
                other += 1
                gap = exact[position][wanted].logprob - logprob_of(exact[position], best)
                assert gap < TIE, f"{name}, position {position}: {gap} nats"
    print(f"{total - other} of {total} best tokens are the same")
    assert other < total * 0.05


def scored(llm: LLM, prompts: Ids) -> dict[str, list[dict[int, Logprob]]]:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=8)
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts.values()], params, use_tqdm=False
    )
    return {name: output.prompt_logprobs for name, output in zip(prompts, outputs, strict=True)}


def top(entry: dict[int, Logprob]) -> int:
    return max(entry, key=lambda token: entry[token].logprob)


def logprob_of(entry: dict[int, Logprob], token: int) -> float:
    return entry[token].logprob if token in entry else -float("inf")


def test_bfloat16_does_not_depend_on_how_steps_are_launched(prompt_ids: Ids) -> None:
    """Graphs or not, run-ahead or not, and what else decodes: the same ids. (A prompt's bits depend
    on the step it is computed in, whose number of tokens chooses cuBLAS's kernels.)"""
    settings = [{}, {"enforce_eager": True}, {"run_ahead_depth": 1}, {"run_ahead_depth": 3}]
    first, *others = [
        greedy_ids(on_card(dtype="bfloat16", **one), prompt_ids, prompt_ids) for one in settings
    ]
    assert all(other == first for other in others)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_are_the_cpus(
    make_llm: Callable[..., LLM], prompt_ids: Ids, pooling: Pooling
) -> None:
    """In chunks beside one another, then (the last) from the cache; in graphs and without."""
    prompts: list[Any] = [{"prompt_token_ids": ids} for ids in prompt_ids.values()]
    params = PoolingParams(pooling=pooling)
    wanted = torch.tensor([one.outputs.embedding for one in make_llm().embed(prompts, params)])
    for settings in ({}, {"enforce_eager": True, "max_num_batched_tokens": 37}):
        llm = on_card(**settings)
        for _ in range(2):
            found = [one.outputs.embedding for one in llm.embed(prompts, params)]
            torch.testing.assert_close(torch.tensor(found), wanted, rtol=0, atol=2e-4)


def test_beams_are_the_cpus(make_llm: Callable[..., LLM], prompt_ids: Ids) -> None:
    prompts: list[Any] = [{"prompt_token_ids": ids} for ids in prompt_ids.values()]
    wanted = make_llm().beam_search(prompts, 3, 10)
    found = on_card().beam_search(prompts, 3, 10)
    same = [ids_of(one) == ids_of(other) for one, other in zip(found, wanted, strict=True)]
    assert sum(same) >= len(same) - 2, "more than near ties"


def ids_of(output: RequestOutput) -> list[list[int]]:
    return [choice.token_ids for choice in output.outputs]

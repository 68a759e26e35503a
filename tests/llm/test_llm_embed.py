"""Embeddings of the offline class on a tiny random model."""

from __future__ import annotations

import math
from typing import Any

import pytest
from llm_helpers import GREEDY, MakeLLM, state_of

from pagemesh import LLM, EmbeddingRequestOutput, PoolingParams
from pagemesh.shared.errors import RequestError

TEXTS = ["the page table of a page", "a", "blocks are freed when the last of the tokens is gone"]
LAST = PoolingParams(pooling="last")


def vectors(outputs: list[EmbeddingRequestOutput]) -> list[list[float]]:
    assert all(output.finished for output in outputs)
    return [output.outputs.embedding for output in outputs]


def near(wanted: list[list[float]]) -> list[Any]:
    return [pytest.approx(vector, abs=1e-5) for vector in wanted]


def test_every_form_of_a_prompt_gives_the_same_vector(llm: LLM) -> None:
    [alone] = llm.embed(TEXTS[0])
    assert math.hypot(*alone.outputs.embedding) == pytest.approx(1)
    assert len(alone.outputs.embedding) == llm.card.hidden_size
    ids = alone.prompt_token_ids
    outputs = llm.embed([TEXTS[0], {"prompt": TEXTS[0]}, {"prompt_token_ids": ids}])
    assert vectors(outputs) == near(vectors([alone]) * 3)
    assert [output.prompt for output in outputs] == [TEXTS[0], TEXTS[0], None]
    assert state_of(llm) == (0, 0, 0.0)


def test_params_are_one_for_all_or_one_each(llm: LLM) -> None:
    mean, last = vectors(llm.embed([TEXTS[0]] * 2, [PoolingParams(), LAST]))
    assert mean != pytest.approx(last, abs=1e-3)
    [cut] = vectors(llm.embed(TEXTS[0], PoolingParams(dimensions=4)))
    assert cut == pytest.approx([number / math.hypot(*mean[:4]) for number in mean[:4]], abs=1e-5)
    [raw] = vectors(llm.embed(TEXTS[0], PoolingParams(normalize=False)))
    assert math.hypot(*raw) != pytest.approx(1, abs=1e-2)


def test_the_setting_says_what_is_pooled(make_llm: MakeLLM, llm: LLM) -> None:
    assert vectors(make_llm(pooling="last").embed(TEXTS)) == near(vectors(llm.embed(TEXTS, LAST)))


def test_the_cache_is_filled_by_both_and_read_by_the_last_token(make_llm: MakeLLM) -> None:
    llm, fresh = make_llm(block_size=4), make_llm(block_size=4, enable_prefix_caching=False)
    for params, cached in ((PoolingParams(), False), (LAST, True), (PoolingParams(), False)):
        outputs = llm.embed(TEXTS, params)
        assert vectors(outputs) == near(vectors(fresh.embed(TEXTS, params)))
        assert any(output.num_cached_tokens for output in outputs) == cached
    [answer] = llm.generate(TEXTS[2], GREEDY)
    assert answer.num_cached_tokens > 0


def test_an_empty_list_has_no_vectors(llm: LLM) -> None:
    assert llm.embed([]) == []


@pytest.mark.parametrize(
    ("prompt", "params", "sentence"),
    [
        ("", PoolingParams(), "prompt 1: the prompt is empty"),
        ("page " * 200, PoolingParams(), "prompt 1: .*maximum context length is 128 tokens"),
        ("a", PoolingParams(dimensions=10**6), "prompt 1: dimensions is 1000000"),
    ],
)
def test_what_cannot_be_pooled_stops_the_call(
    llm: LLM, prompt: str, params: PoolingParams, sentence: str
) -> None:
    with pytest.raises(RequestError, match=sentence):
        llm.embed(["a", prompt], [PoolingParams(), params])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [({"pooling": "max"}, "pooling must be one of"), ({"dimensions": 0}, "dimensions must be")],
)
def test_params_check_themselves(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        PoolingParams(**fields)


def test_a_prompt_that_fails_fails_the_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("pagemesh.worker_svc.pooling.Pooler.pool", lambda *_: 1 / 0)
        with pytest.raises(RequestError, match="the worker failed on this request"):
            llm.embed(TEXTS)
    assert state_of(llm) == (0, 0, 0.0)
    assert len(vectors(llm.embed(TEXTS))) == 3

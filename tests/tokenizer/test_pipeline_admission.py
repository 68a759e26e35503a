"""What the pipeline admits and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from pipeline_driver import admit, ids_of, model_of, pipeline_of, refused
from scripts import card_of, generate, tokens

from pagemesh.shared.engine_messages import Ended
from pagemesh.shared.errors import RequestError
from pagemesh.shared.hashing import chain_hashes, split_hashes
from pagemesh.shared.sampling import child_seed
from pagemesh.shared.wire import unpack_ids
from pagemesh.tokenizer_svc.pipeline import Pipeline
from pagemesh.tokenizer_svc.text_model import TextModel


def test_a_submit_carries_prompt_hashes_and_parameters(pipeline: Pipeline) -> None:
    request = generate("Hello world again", cache_salt="salt", priority=3, stop=["x"], top_k=5)
    admitted = pipeline.admit(request, card_of(model_of(pipeline)))
    [submit] = admitted.submits
    assert admitted.prompt_text is None
    assert unpack_ids(submit.prompt_ids) == ids_of(pipeline, "Hello world again")
    assert split_hashes(submit.hashes) == chain_hashes(submit.prompt_ids, 4, salt="salt")
    assert submit.hashes != b"".join(chain_hashes(submit.prompt_ids, 4))
    assert (submit.seed, submit.priority, submit.cache_salt) == (7, 3, "salt")
    assert (submit.attempt, submit.group, submit.prior_ids) == (1, "", b"")
    assert (submit.params.top_k, submit.params.stop, submit.params.n) == (5, [], 1)


def test_choices_get_seeds_keys_and_one_group(pipeline: Pipeline) -> None:
    submits = admit(pipeline, n=3, prompt_logprobs=1)
    assert [s.choice for s in submits] == [0, 1, 2]
    assert [s.seed for s in submits] == [child_seed(7, i) for i in range(3)]
    assert len({s.key for s in submits}) == 3
    assert len({s.group for s in submits}) == 1
    assert submits[0].group != ""
    assert [s.params.prompt_logprobs for s in submits] == [1, None, None]


def test_open_max_tokens_means_what_fits(pipeline: Pipeline) -> None:
    [submit] = admit(pipeline, max_tokens=None)
    assert submit.params.max_tokens == 128 - len(submit.prompt_ids) // 4


def test_prompt_text_for_echo(pipeline: Pipeline) -> None:
    card = card_of(model_of(pipeline))
    ids = ids_of(pipeline, "Hello there")
    by_text = pipeline.admit(generate("Hello there", "a", want_prompt_text=True), card)
    by_ids = pipeline.admit(generate(ids, "b", want_prompt_text=True), card)
    assert by_text.prompt_text == by_ids.prompt_text == "Hello there"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [402]}, "prompt", "402"),
        ({"prompt": [5, -1]}, "prompt", "-1"),
        ({"prompt": [2**31 - 1]}, "prompt", str(2**31 - 1)),
        ({"logit_bias": {402: 1.0}}, "logit_bias", "402"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias", "-1"),
        ({"logit_bias": {2**63: 1.0}}, "logit_bias", str(2**63)),
        ({"stop_token_ids": [2**40]}, "stop_token_ids", str(2**40)),
        ({"stop": ["x" * 2000]}, "stop", "1024"),
        ({"stop": [str(i) for i in range(200)]}, "stop", "128"),
        ({"max_tokens": None, "min_tokens": 1000}, "min_tokens", "min_tokens"),
        ({"prompt": "a\ud800b"}, None, "surrogate"),
    ],
)
def test_bad_input_is_refused(
    pipeline: Pipeline, fields: dict[str, Any], param: str | None, words: str
) -> None:
    error = refused(pipeline, **fields)
    assert (error.status, error.param) == (400, param)
    assert words in error.message


def test_ids_up_to_the_models_vocabulary_are_taken(pipeline: Pipeline) -> None:
    assert len(admit(pipeline, prompt=[model_of(pipeline).prepared.vocab_tokens - 1])) == 1


@pytest.mark.parametrize(("n_prompt", "max_tokens"), [(128, None), (128, 1), (500, None), (129, 0)])
def test_over_long_prompts_are_refused_with_both_numbers(
    pipeline: Pipeline, n_prompt: int, max_tokens: int | None
) -> None:
    error = refused(pipeline, prompt=[5] * n_prompt, max_tokens=max_tokens)
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "prompt")
    assert "maximum context length is 128 tokens" in error.message
    assert f"{n_prompt} tokens" in error.message


def test_too_many_tokens_asked_for_are_refused_with_both_numbers(pipeline: Pipeline) -> None:
    error = refused(pipeline, prompt=[5] * 100, max_tokens=29)
    assert (error.code, error.param) == ("context_length_exceeded", "max_tokens")
    assert "maximum context length is 128 tokens" in error.message
    assert "29 > 128 - 100" in error.message


def test_more_prompt_logprobs_than_a_frame_holds_are_refused(byte_level: TextModel) -> None:
    request = generate([5] * 5_000, prompt_logprobs=64)
    card = card_of(byte_level, max_model_len=100_000)
    with pytest.raises(RequestError, match="325000 entries") as caught:
        pipeline_of(byte_level).prepare(request, card)
    assert caught.value.param == "prompt_logprobs"


def test_a_prompt_that_fills_the_context_may_be_scored(pipeline: Pipeline) -> None:
    [submit] = admit(pipeline, prompt=[5] * 128, max_tokens=0)
    [delta] = pipeline.feed(tokens(ended=[Ended(submit.key, "length")])).deltas
    assert (delta.finish_reason, delta.text, delta.token_ids) == ("length", "", b"")


def test_an_id_in_use_is_refused(pipeline: Pipeline) -> None:
    admit(pipeline)
    with pytest.raises(RequestError) as caught:
        admit(pipeline)
    assert caught.value.status == 409
    assert len(pipeline) == 1

"""Prompts that become a vector, in the pipeline."""

from __future__ import annotations

import pytest
from pipeline_driver import admit, refused
from scripts import tokens

from pagemesh.shared.engine_messages import Ended, Pooled
from pagemesh.shared.messages import Prompt, PromptExtras
from pagemesh.shared.pooling import NO_TOKENS, PoolingParams
from pagemesh.shared.wire import pack_ids, unpack_ids
from pagemesh.tokenizer_svc.pipeline import Pipeline

POOLED = {"pooling": PoolingParams(), "max_tokens": NO_TOKENS.max_tokens}
VECTOR = bytes(range(8))


def test_the_vector_comes_with_the_end(pipeline: Pipeline) -> None:
    [submit] = admit(pipeline, **POOLED)
    assert submit.pooling == PoolingParams(pooling="mean")
    frame = tokens(ended=[Ended(submit.key, "length")], pooled=[Pooled(submit.key, VECTOR)])
    [delta] = pipeline.feed(frame).deltas
    assert (delta.vector, delta.finish_reason, delta.token_ids) == (VECTOR, "length", b"")
    assert len(pipeline) == 0


def test_a_lost_engine_has_given_nothing(pipeline: Pipeline) -> None:
    [submit] = admit(pipeline, **POOLED)
    [again], none = pipeline.resume([submit.key])
    assert none == []
    assert again.pooling == submit.pooling
    late = tokens(ended=[Ended(submit.key, "length")], pooled=[Pooled(submit.key, VECTOR)])
    assert pipeline.feed(late).deltas == []
    frame = tokens(ended=[Ended(again.key, "length")], pooled=[Pooled(again.key, VECTOR)])
    assert pipeline.feed(frame).deltas[0].vector == VECTOR


def test_the_last_tokens_count_and_a_whole_context_fits(pipeline: Pipeline) -> None:
    ids = list(range(5, 205))
    prompt = Prompt(token_ids=pack_ids(ids), extras=PromptExtras(truncate_tokens=-1))
    [submit] = admit(pipeline, prompt=prompt, **POOLED)
    assert unpack_ids(submit.prompt_ids) == ids[-128:]


@pytest.mark.parametrize(
    ("prompt", "dimensions", "param"),
    [
        (Prompt(text="", add_special_tokens=False, field="input"), None, "input"),
        (Prompt(text="word " * 400, field="input"), None, "input"),
        (Prompt(token_ids=bytes(4 * 129), field="input"), None, "input"),
        (Prompt(text="a", field="input"), 9, "dimensions"),
    ],
    ids=["empty", "long", "long ids", "dimensions"],
)
def test_what_cannot_be_pooled_names_the_field(
    pipeline: Pipeline, prompt: Prompt, dimensions: int | None, param: str
) -> None:
    pooling = PoolingParams(dimensions=dimensions)
    assert refused(pipeline, prompt=prompt, max_tokens=0, pooling=pooling).param == param

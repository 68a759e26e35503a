"""Requests and ids put through a pipeline, without sockets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from scripts import card_of, generate, tokens

from pagemesh.shared.engine_messages import Ended, Submit
from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import Delta, Generate, Prompt
from pagemesh.tokenizer_svc.pipeline import Pipeline
from pagemesh.tokenizer_svc.text_model import TextModel
from pagemesh.tokenizer_svc.text_models import TextModels

EOS = 2


def pipeline_of(model: TextModel) -> Pipeline:
    return Pipeline(TextModels([model]))


def model_of(pipeline: Pipeline) -> TextModel:
    """The only one."""
    [model] = pipeline.text_models
    return model


def ids_of(pipeline: Pipeline, text: str) -> list[int]:
    return model_of(pipeline).encode(Prompt(text=text, add_special_tokens=False))


def admit(pipeline: Pipeline, request: Generate | None = None, **fields: Any) -> list[Submit]:
    request = request if request is not None else generate(**fields)
    return pipeline.admit(request, card_of(model_of(pipeline))).submits


def run(pipeline: Pipeline, key: int, ids: Sequence[int], end: Ended | None = None) -> list[Delta]:
    """Feed one id a frame, the last one together with `end`."""
    deltas: list[Delta] = []
    for i, token_id in enumerate(ids):
        ended = [end] if end is not None and i == len(ids) - 1 else []
        deltas += pipeline.feed(tokens({key: [token_id]}, ended=ended)).deltas
    return deltas


def refused(pipeline: Pipeline, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        admit(pipeline, **fields)
    assert len(pipeline) == 0
    return caught.value

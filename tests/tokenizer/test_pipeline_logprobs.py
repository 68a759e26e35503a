"""Logprobs of sampled and of prompt tokens in the pipeline's deltas."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_driver import admit, ids_of
from scripts import logprob_row, prompt_logprobs, tokens

from pagemesh.tokenizer_svc.logprobs import pieces, prompt_token_logprobs
from pagemesh.tokenizer_svc.pipeline import Pipeline
from pagemesh.tokenizer_svc.text_model import TextModel


def test_logprobs_carry_text_bytes_rank_and_alternatives(pipeline: Pipeline) -> None:
    half = ids_of(pipeline, "😀")[0]
    other = ids_of(pipeline, "a")[0]
    [submit] = admit(pipeline, logprobs=2)
    row = logprob_row(submit.key, [half, other, half], [-1.5, -0.25, -1.5], 2)
    [delta] = pipeline.feed(tokens({submit.key: [half]}, logprobs=[row])).deltas
    assert delta.logprobs is not None
    [entry] = delta.logprobs
    assert (entry.token_id, entry.token, entry.rank) == (half, "\ufffd", 2)
    assert (entry.data, entry.logprob) == (b"\xf0\x9f", -1.5)
    assert entry.top == [(other, "a", b"a", -0.25, 1), (half, "\ufffd", b"\xf0\x9f", -1.5, 2)]


def test_logprobs_of_several_tokens_keep_their_own_alternatives(pipeline: Pipeline) -> None:
    a, b = ids_of(pipeline, "a")[0], ids_of(pipeline, "b")[0]
    [submit] = admit(pipeline, logprobs=1)
    rows = [logprob_row(submit.key, [i, j], [-1, -2], 1) for i, j in ((a, b), (b, a))]
    [delta] = pipeline.feed(tokens({submit.key: [a, b]}, logprobs=rows)).deltas
    assert delta.logprobs is not None
    assert [(e.token, e.top[0][1]) for e in delta.logprobs] == [("a", "b"), ("b", "a")]


@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e30])
def test_logprobs_are_finite(pipeline: Pipeline, value: float) -> None:
    [submit] = admit(pipeline, logprobs=1)
    row = logprob_row(submit.key, [5, 6], [value, value], 3)
    [delta] = pipeline.feed(tokens({submit.key: [5]}, logprobs=[row])).deltas
    assert delta.logprobs is not None
    assert delta.logprobs[0].logprob == delta.logprobs[0].top[0][3] == -9999.0


def test_prompt_logprobs_come_once_with_the_first_delta(pipeline: Pipeline) -> None:
    prompt = [5, 6, 7, 8]
    [submit] = admit(pipeline, prompt=prompt, prompt_logprobs=1)
    early = prompt_logprobs(submit.key, 1, [[(6, -1.0), (9, -0.5)]], [2])
    late = prompt_logprobs(
        submit.key, 2, [[(7, -2.0), (7, -2.0)], [(8, -math.inf), (9, -0.1)]], [1, 4]
    )
    assert pipeline.feed(tokens(prompt_logprobs=[early])).deltas == []
    [first] = pipeline.feed(tokens({submit.key: [5]}, prompt_logprobs=[late])).deltas
    [second] = pipeline.feed(tokens({submit.key: [5]})).deltas
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    entries = [entry for entry in first.prompt_logprobs if entry is not None]
    assert [(e.token_id, e.logprob, e.rank) for e in entries] == [
        (6, -1.0, 2),
        (7, -2.0, 1),
        (8, -9999.0, 4),
    ]
    assert second.prompt_logprobs is None


def test_prompt_logprobs_sent_again_replace_the_earlier_ones(pipeline: Pipeline) -> None:
    [submit] = admit(pipeline, prompt=[5, 6, 7], prompt_logprobs=0)
    once = prompt_logprobs(submit.key, 1, [[(6, -1.0)], [(7, -1.0)]], [1, 1])
    again = prompt_logprobs(submit.key, 1, [[(6, -1.0)], [(7, -1.0)]], [1, 1])
    frame = tokens({submit.key: [5]}, prompt_logprobs=[once, again])
    [delta] = pipeline.feed(frame).deltas
    assert delta.prompt_logprobs is not None
    assert len(delta.prompt_logprobs) == 3


@given(n_positions=st.integers(1, 20), width=st.integers(1, 5), max_entries=st.integers(1, 30))
def test_prompt_logprobs_in_pieces_are_the_same_rows(
    byte_level: TextModel, n_positions: int, width: int, max_entries: int
) -> None:
    rows = [[(at + i, -float(at + i)) for i in range(width)] for at in range(n_positions)]
    whole = prompt_logprobs(3, 1, rows, range(n_positions))
    cut = list(pieces([whole], max_entries))
    assert all(len(piece.ids) <= 4 * max(width, max_entries) for piece in cut)
    assert [piece.start for piece in cut] == [
        1 + sum(len(p.ranks) // 4 for p in cut[:i]) for i in range(len(cut))
    ]
    entries = [entry for piece in cut for entry in prompt_token_logprobs(byte_level, piece)]
    assert entries == prompt_token_logprobs(byte_level, whole)

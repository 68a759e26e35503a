"""From the engine's ids to text, and where stop strings end it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipeline_driver import EOS, admit, ids_of, pipeline_of, run
from scripts import logprob_row, text_of, tokens

from pagemesh.shared.engine_messages import Ended
from pagemesh.shared.wire import unpack_ids
from pagemesh.tokenizer_svc.pipeline import Pipeline
from pagemesh.tokenizer_svc.text_model import TextModel

# -- text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [Ended(0, "length"), Ended(0, "abort")])
def test_text_and_ids_join_to_the_whole(pipeline: Pipeline, end: Ended) -> None:
    [submit] = admit(pipeline)
    ids = ids_of(pipeline, " naïve 世界 😀 end")
    deltas = run(pipeline, submit.key, ids, end._replace(key=submit.key))
    assert text_of(deltas) == " naïve 世界 😀 end"
    assert unpack_ids(b"".join(d.token_ids for d in deltas)) == ids
    assert [d.finish_reason for d in deltas] == [None] * (len(ids) - 1) + [end.finish_reason]
    assert not any("\ufffd" in d.text for d in deltas)
    assert len(pipeline) == 0


def test_half_a_character_at_the_end_is_shown_once(pipeline: Pipeline) -> None:
    [submit] = admit(pipeline)
    ids = ids_of(pipeline, "ok 😀")[:-1]
    deltas = run(pipeline, submit.key, ids, Ended(submit.key, "length"))
    assert text_of(deltas) == "ok \ufffd"
    assert deltas[-1].text.count("\ufffd") == 1


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_the_text_of_a_stop_token_is_not_shown(
    pipeline: Pipeline, skip_special_tokens: bool
) -> None:
    [submit] = admit(pipeline, skip_special_tokens=skip_special_tokens)
    ids = [*ids_of(pipeline, "bye"), EOS]
    deltas = run(pipeline, submit.key, ids, Ended(submit.key, "stop"))
    assert text_of(deltas) == "bye"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", None)
    assert unpack_ids(deltas[-1].token_ids) == [EOS]


def test_a_stop_token_is_shown_when_asked_for(pipeline: Pipeline) -> None:
    [submit] = admit(pipeline, skip_special_tokens=False, include_stop_str_in_output=True)
    deltas = run(pipeline, submit.key, [*ids_of(pipeline, "bye"), EOS], Ended(submit.key, "stop"))
    assert text_of(deltas) == "bye</s>"


def test_stop_token_ids_are_named_and_hidden(pipeline: Pipeline) -> None:
    [ids] = [ids_of(pipeline, "a!")]
    [submit] = admit(pipeline, stop_token_ids=[ids[-1]])
    deltas = run(pipeline, submit.key, ids, Ended(submit.key, "stop", ids[-1]))
    assert text_of(deltas) == "a"
    assert deltas[-1].stop_reason == ids[-1]


def test_an_ignored_eos_is_a_token_like_others(pipeline: Pipeline) -> None:
    [submit] = admit(pipeline, ignore_eos=True, skip_special_tokens=False)
    ids = [*ids_of(pipeline, "a"), EOS, *ids_of(pipeline, "b")]
    assert text_of(run(pipeline, submit.key, ids, Ended(submit.key, "length"))) == "a</s>b"


# -- stop strings ---------------------------------------------------------------------------------


def test_a_stop_string_ends_the_choice_and_tells_the_engine(pipeline: Pipeline) -> None:
    [submit] = admit(pipeline, stop=["lazy dog"])
    shown = []
    for token_id in ids_of(pipeline, "the lazy dog sleeps"):
        fed = pipeline.feed(tokens({submit.key: [token_id]}))
        shown += fed.deltas
        if fed.end_keys:
            break
    assert fed.end_keys == [submit.key]
    assert text_of(shown) == "the "
    assert (shown[-1].finish_reason, shown[-1].stop_reason) == ("stop", "lazy dog")
    late = pipeline.feed(tokens({submit.key: ids_of(pipeline, " sleeps")}))
    assert late == ([], [], [])


def test_tokens_after_a_stop_string_do_not_count(pipeline: Pipeline) -> None:
    [submit] = admit(pipeline, stop=["b"], logprobs=0)
    ids = ids_of(pipeline, "a")[:1] + ids_of(pipeline, "b") + ids_of(pipeline, "c")
    rows = [logprob_row(submit.key, [i], [-0.5], 1) for i in ids]
    [delta] = pipeline.feed(tokens({submit.key: ids}, logprobs=rows)).deltas
    assert delta.text == "a"
    assert unpack_ids(delta.token_ids) == ids[:2]
    assert delta.logprobs is not None
    assert [entry.token_id for entry in delta.logprobs] == ids[:2]


def test_a_stop_string_wins_over_the_engines_own_end(pipeline: Pipeline) -> None:
    [submit] = admit(pipeline, stop=["z"])
    fed = pipeline.feed(
        tokens({submit.key: ids_of(pipeline, "z")}, ended=[Ended(submit.key, "length")])
    )
    assert (fed.deltas[0].finish_reason, fed.deltas[0].stop_reason) == ("stop", "z")
    assert fed.end_keys == []


def test_a_stop_string_of_half_a_character_is_found_at_the_end(pipeline: Pipeline) -> None:
    [submit] = admit(pipeline, stop=["\ufffd"])
    deltas = run(pipeline, submit.key, ids_of(pipeline, "a😀")[:-1], Ended(submit.key, "length"))
    assert text_of(deltas) == "a"
    assert deltas[-1].stop_reason == "\ufffd"


def test_stop_strings_rest_until_min_tokens(pipeline: Pipeline) -> None:
    one = ids_of(pipeline, "x")
    [submit] = admit(pipeline, stop=["x"], min_tokens=3)
    deltas = run(pipeline, submit.key, one * 3)
    assert text_of(deltas) == "xxx"
    fed = pipeline.feed(tokens({submit.key: one}))
    assert (fed.deltas[0].text, fed.deltas[0].stop_reason) == ("", "x")


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_outcome_does_not_depend_on_how_ids_are_cut_into_frames(
    data: st.DataObject, byte_level: TextModel
) -> None:
    """Nor on losing the engine between any two frames."""
    vocab = byte_level.prepared.vocab_tokens
    ids = data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=20))
    options = {
        "stop": data.draw(st.lists(st.text(alphabet="abe th", min_size=1, max_size=2), max_size=2)),
        "min_tokens": data.draw(st.integers(0, 4)),
        "stop_token_ids": data.draw(st.lists(st.integers(0, vocab - 1), max_size=2)),
    }
    whole, parts = pipeline_of(byte_level), pipeline_of(byte_level)
    expected = _scripted(whole, ids, [len(ids)], options, lose=[])
    cuts = data.draw(st.lists(st.integers(1, 4), min_size=len(ids), max_size=len(ids)))
    lose = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    assert _scripted(parts, ids, cuts, options, lose=lose) == expected


def _scripted(
    pipeline: Pipeline,
    ids: list[int],
    cuts: list[int],
    options: dict[str, Any],
    *,
    lose: list[bool],
) -> tuple[str, bytes, object]:
    """Run `ids` cut into frames of `cuts` tokens; where `lose` says so the engine is lost first."""
    stop_ids = {EOS, *options["stop_token_ids"]}
    ends = [i for i, x in enumerate(ids) if x in stop_ids and i >= options["min_tokens"]]
    n_all = ends[0] + 1 if ends else len(ids)
    [submit] = admit(pipeline, max_tokens=max(n_all, options["min_tokens"]), **options)
    key, at, deltas = submit.key, 0, []
    for i, size in enumerate(cuts):
        if at >= n_all or not len(pipeline):
            break
        if i < len(lose) and lose[i]:
            resumed = pipeline.resume([key])
            deltas += resumed.deltas
            if not resumed.submits:
                break
            key = resumed.submits[0].key
            at = len(resumed.submits[0].prior_ids) // 4
        chunk = ids[at : min(at + size, n_all)]
        at += len(chunk)
        end = Ended(key, "stop" if ends else "length", None)
        fed = pipeline.feed(tokens({key: chunk}, ended=[end] if at >= n_all else []))
        deltas += fed.deltas
    assert deltas[-1].error is None
    return text_of(deltas), b"".join(d.token_ids for d in deltas), deltas[-1].finish_reason

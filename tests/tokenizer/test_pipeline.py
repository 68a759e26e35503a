"""The pipeline with a scripted engine: from Generate to deltas, without sockets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripts import card_of, generate, logprob_row, prompt_logprobs, tokens
from structlog.testing import capture_logs

from pagemesh.shared.errors import RequestError
from pagemesh.shared.hashing import chain_hashes, split_hashes
from pagemesh.shared.sampling import child_seed
from pagemesh.shared.wire import (
    Delta,
    Ended,
    Generate,
    Prompt,
    Submit,
    WireError,
    pack_ids,
    unpack_ids,
)
from pagemesh.tokenizer_svc.logprobs import pieces, prompt_token_logprobs
from pagemesh.tokenizer_svc.pipeline import MAX_FRUITLESS_LOSSES, Pipeline
from pagemesh.tokenizer_svc.text_model import TextModel

EOS = 2


@pytest.fixture
def pipeline(byte_level: TextModel) -> Pipeline:
    return Pipeline(byte_level)


def ids_of(pipeline: Pipeline, text: str) -> list[int]:
    return pipeline.text_model.encode(Prompt(text=text, add_special_tokens=False))


def admit(pipeline: Pipeline, request: Generate | None = None, **fields: Any) -> list[Submit]:
    request = request if request is not None else generate(**fields)
    return pipeline.admit(request, card_of(pipeline.text_model)).submits


def run(pipeline: Pipeline, key: int, ids: Sequence[int], end: Ended | None = None) -> list[Delta]:
    """Feed one id a frame, the last one together with `end`."""
    deltas: list[Delta] = []
    for i, token_id in enumerate(ids):
        ended = [end] if end is not None and i == len(ids) - 1 else []
        deltas += pipeline.feed(tokens({key: [token_id]}, ended=ended)).deltas
    return deltas


def text_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def refused(pipeline: Pipeline, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        admit(pipeline, **fields)
    assert len(pipeline) == 0
    return caught.value


# -- admission ------------------------------------------------------------------------------------


def test_a_submit_carries_prompt_hashes_and_parameters(pipeline: Pipeline) -> None:
    request = generate("Hello world again", cache_salt="salt", priority=3, stop=["x"], top_k=5)
    admitted = pipeline.admit(request, card_of(pipeline.text_model))
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
    card = card_of(pipeline.text_model)
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
    assert len(admit(pipeline, prompt=[pipeline.text_model.prepared.vocab_tokens - 1])) == 1


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
        Pipeline(byte_level).prepare(request, card)
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
    assert late == ([], [])


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
    whole, parts = Pipeline(byte_level), Pipeline(byte_level)
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


# -- logprobs -------------------------------------------------------------------------------------


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


# -- failures and resumption ----------------------------------------------------------------------


def test_cached_tokens_are_reported(pipeline: Pipeline) -> None:
    [submit] = admit(pipeline)
    pipeline.feed(tokens(started=[(submit.key, 12)]))
    assert run(pipeline, submit.key, [5])[0].cached_tokens == 12


def test_one_failed_choice_leaves_the_others(pipeline: Pipeline) -> None:
    first, second = admit(pipeline, n=2)
    error = WireError(500, "nonfinite", None, "NaN")
    [delta] = pipeline.feed(tokens(failed=[(first.key, error)])).deltas
    assert (delta.choice, delta.error, delta.text) == (0, error, "")
    assert "r1" in pipeline
    assert run(pipeline, second.key, [5])[0].choice == 1


def test_a_choice_that_cannot_be_decoded_fails_alone(pipeline: Pipeline) -> None:
    first, second = admit(pipeline, n=2)
    with capture_logs() as lines:
        fed = pipeline.feed(tokens({first.key: [-5], second.key: ids_of(pipeline, "a")[:1]}))
    [line] = lines
    assert (line["event"], line["request_id"], line["exc_info"]) == (
        "undecodable_tokens",
        "r1",
        True,
    )
    assert fed.end_keys == [first.key]
    assert fed.deltas[0].error is not None
    assert fed.deltas[0].error.status == 500
    assert fed.deltas[0].error.message == "the engine's tokens cannot be decoded"
    assert (fed.deltas[1].choice, fed.deltas[1].text) == (1, "a")


def test_a_lost_engine_is_followed_by_a_new_attempt(pipeline: Pipeline) -> None:
    ids = ids_of(pipeline, " naïve 世界 STOP more")
    [submit] = admit(pipeline, stop=["STOP"], n=1)
    half = len(ids) // 2
    deltas = run(pipeline, submit.key, ids[:half])
    [again], none = pipeline.resume([submit.key])
    assert none == []
    assert (again.attempt, unpack_ids(again.prior_ids)) == (2, ids[:half])
    assert again.key != submit.key
    assert (again.seed, again.prompt_ids, again.hashes) == (
        submit.seed,
        submit.prompt_ids,
        submit.hashes,
    )
    assert pipeline.feed(tokens({submit.key: [5]})).deltas == []
    deltas += run(pipeline, again.key, ids[half:])
    assert text_of(deltas) == " naïve 世界 "


def test_resumed_choices_leave_their_group(pipeline: Pipeline) -> None:
    submits = admit(pipeline, n=2)
    run(pipeline, submits[0].key, [5], Ended(submits[0].key, "length"))
    [again], _ = pipeline.resume([submit.key for submit in submits])
    assert (again.choice, again.group) == (1, "")


def test_prompt_logprobs_are_asked_for_again_only_when_undelivered(pipeline: Pipeline) -> None:
    [submit] = admit(pipeline, prompt_logprobs=1)
    [again], _ = pipeline.resume([submit.key])
    assert again.params.prompt_logprobs == 1
    run(pipeline, again.key, [5])
    [last], _ = pipeline.resume([again.key])
    assert last.params.prompt_logprobs is None


def test_attempts_without_progress_are_bounded(pipeline: Pipeline) -> None:
    [submit] = admit(pipeline)
    for _ in range(MAX_FRUITLESS_LOSSES):
        [submit], _ = pipeline.resume([submit.key])
    submits, [delta] = pipeline.resume([submit.key])
    assert submits == []
    assert delta.error is not None
    assert (delta.error.status, delta.error.code) == (503, "engine_unavailable")
    assert len(pipeline) == 0


def test_progress_starts_the_count_anew(pipeline: Pipeline) -> None:
    [submit] = admit(pipeline)
    for _ in range(3 * MAX_FRUITLESS_LOSSES):
        run(pipeline, submit.key, [5])
        [submit], _ = pipeline.resume([submit.key])
    assert unpack_ids(submit.prior_ids) == [5] * 3 * MAX_FRUITLESS_LOSSES


def test_a_request_resumed_by_the_gateway_goes_on_at_the_same_character(
    byte_level: TextModel,
) -> None:
    before, after = Pipeline(byte_level), Pipeline(byte_level)
    ids = ids_of(before, "one 世界 two END three")
    request = generate(stop=["END"])
    [submit] = admit(before, request)
    half = len(ids_of(before, "one 世界")) - 1
    deltas = run(before, submit.key, ids[:half])
    assert text_of(deltas) == "one 世"
    prior = b"".join(delta.token_ids for delta in deltas)
    [again] = admit(after, request._replace(attempt=2, prior_ids=[prior]))
    assert unpack_ids(again.prior_ids) == ids[:half]
    deltas += run(after, again.key, ids[half:])
    assert text_of(deltas) == "one 世界 two "


@pytest.mark.parametrize(
    ("prior", "options", "finish"),
    [
        ([5, EOS], {}, ("stop", None)),
        ([5, 6], {"stop_token_ids": [6]}, ("stop", 6)),
        ([5, 6], {"max_tokens": 2}, ("length", None)),
    ],
)
def test_a_choice_that_was_done_is_not_placed_again(
    pipeline: Pipeline, prior: list[int], options: dict[str, Any], finish: tuple[str, int | None]
) -> None:
    request = generate(n=2, prior_ids=[pack_ids(prior), pack_ids([5])], **options)
    admitted = pipeline.admit(request, card_of(pipeline.text_model))
    [delta] = admitted.deltas
    assert (delta.choice, delta.finish_reason, delta.stop_reason) == (0, *finish)
    assert [submit.choice for submit in admitted.submits] == [1]


def test_prior_ids_must_fit_the_request(pipeline: Pipeline) -> None:
    assert "prior_ids" in refused(pipeline, n=2, prior_ids=[b""]).message
    assert refused(pipeline, prior_ids=[pack_ids([9999])]).param == "prior_ids"


def test_closing_a_request_names_what_still_runs(pipeline: Pipeline) -> None:
    first, second, third = admit(pipeline, n=3)
    run(pipeline, second.key, [5], Ended(second.key, "length"))
    assert pipeline.close("r1") == [first.key, third.key]
    assert len(pipeline) == 0
    assert pipeline.feed(tokens({first.key: [5], third.key: [6]})) == ([], [])
    assert pipeline.close("r1") == []

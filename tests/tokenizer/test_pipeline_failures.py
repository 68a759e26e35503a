"""Failed choices, lost engines and requests that the gateway resumes, in the pipeline."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from pipeline_driver import EOS, admit, ids_of, model_of, pipeline_of, refused, run
from scripts import card_of, generate, text_of, tokens
from structlog.testing import capture_logs

from pagemesh.shared.engine_messages import Ended, Started
from pagemesh.shared.messages import WireError
from pagemesh.shared.wire import pack_ids, unpack_ids
from pagemesh.tokenizer_svc.pipeline import MAX_FRUITLESS_LOSSES, Pipeline
from pagemesh.tokenizer_svc.text_model import TextModel


def test_cached_tokens_are_reported(pipeline: Pipeline) -> None:
    [submit] = admit(pipeline)
    pipeline.feed(tokens(started=[Started(submit.key, 12)]))
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
    before, after = pipeline_of(byte_level), pipeline_of(byte_level)
    ids = ids_of(before, "one 世界 two END three")
    request = generate(stop=["END"])
    [submit] = admit(before, request)
    half = len(ids_of(before, "one 世界")) - 1
    deltas = run(before, submit.key, ids[:half])
    assert text_of(deltas) == "one 世"
    prior = b"".join(delta.token_ids for delta in deltas)
    [again] = admit(after, msgspec.structs.replace(request, attempt=2, prior_ids=[prior]))
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
    admitted = pipeline.admit(request, card_of(model_of(pipeline)))
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
    assert pipeline.feed(tokens({first.key: [5], third.key: [6]})) == ([], [], [])
    assert pipeline.close("r1") == []

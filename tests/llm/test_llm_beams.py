"""Beam search of the offline class on a tiny random model: whatever room there is for its pages, it
finds the same, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
from llm_helpers import MakeLLM, ids_of, state_of
from tiny_llama import EOS

from pagemesh import LLM, SamplingParams
from pagemesh.shared.errors import RequestError

PROMPTS = ["the page table of", "a", "blocks are freed when the last of the tokens is gone"]


def test_pages_are_shared_and_given_back(make_llm: MakeLLM) -> None:
    """A token is computed once for each beam, and the prompt once for all."""
    llm = make_llm(block_size=4)
    [output] = llm.beam_search(PROMPTS[2], 4, 9, ignore_eos=True)
    assert [len(choice.token_ids) for choice in output.outputs] == [9] * 4
    assert llm._loop.stats.steps.tokens.total == len(output.prompt_token_ids) + 4 * 8
    assert state_of(llm) == (0, 0, 0.0)
    assert llm._loop._engine.audit() == []


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 3},
        {"max_num_seqs": 6, "enable_prefix_caching": False},
        {"kv_cache_memory": "40KiB", "block_size": 8},
        {"max_num_batched_tokens": 7, "run_ahead_depth": 1},
    ],
    ids=str,
)
def test_with_little_room_the_same_is_found(
    make_llm: MakeLLM, llm: LLM, settings: dict[str, Any]
) -> None:
    small = make_llm(max_model_len=64, **settings)
    wanted = llm.beam_search(PROMPTS, 5, 10)
    found = small.beam_search(PROMPTS, 5, 10)
    assert ids_of(found) == ids_of(wanted)
    assert state_of(small) == (0, 0, 0.0)
    assert small._loop._engine.audit() == []


def test_the_best_beam_of_one_is_greedy(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
    wanted = llm.generate(PROMPTS, greedy)
    found = llm.beam_search(PROMPTS, 1, 6, ignore_eos=True)
    assert ids_of(found) == ids_of(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.prompt_token_ids == other.prompt_token_ids
        [beam], [choice] = one.outputs, other.outputs
        assert beam.text == choice.text
        assert beam.cumulative_logprob == pytest.approx(choice.cumulative_logprob, abs=1e-5)


def test_an_end_ends_a_beam_unless_it_is_ignored(llm: LLM) -> None:
    for output in llm.beam_search(PROMPTS, 8, 12, length_penalty=0.0):
        for choice in output.outputs:
            assert (choice.finish_reason == "stop") == (choice.token_ids[-1] == EOS)
            assert EOS not in choice.token_ids[:-1]
    for output in llm.beam_search(PROMPTS, 8, 12, ignore_eos=True):
        assert {choice.finish_reason for choice in output.outputs} == {"length"}


def test_a_call_that_is_interrupted_leaves_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pagemesh.llm_beams.BeamSearch.advance", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.beam_search(PROMPTS, 3, 5)
    assert state_of(llm) == (0, 0, 0.0)
    assert len(llm.beam_search(PROMPTS, 3, 5)) == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"beam_width": 0}, "beam_width must be between 1 and 63, got 0"),
        ({"beam_width": 64}, "beam_width must be between 1 and 63, got 64"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": 500}, "prompt 0: .*max_tokens"),
    ],
)
def test_what_cannot_be_searched_is_refused(
    llm: LLM, arguments: dict[str, int], sentence: str
) -> None:
    with pytest.raises(RequestError, match=sentence):
        llm.beam_search("a page", **arguments)  # type: ignore[arg-type]

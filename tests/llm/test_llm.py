"""`LLM`: inputs, outputs and refusals."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from llm_helpers import GREEDY, WARM, MakeLLM, ids_of, state_of
from tiny_llama import EOS, VOCAB_TOKENS

from pagemesh import LLM, CompletionOutput, SamplingParams
from pagemesh.llm_metrics import Counter, Gauge, Histogram
from pagemesh.shared.errors import RequestError, SettingsError, StartupError

# -- inputs and outputs ---------------------------------------------------------------------------


def test_every_form_of_a_prompt_is_the_same_prompt(llm: LLM) -> None:
    text = "the page table"
    (alone,) = llm.generate(text, GREEDY)
    ids = alone.prompt_token_ids
    outputs = llm.generate([text, {"prompt": text}, {"prompt_token_ids": ids}], GREEDY)
    assert ids_of(outputs) == ids_of([alone]) * 3
    assert [output.prompt for output in outputs] == [text, text, None]
    assert [output.prompt_token_ids for output in outputs] == [ids] * 3


def test_outputs_stand_in_the_order_of_the_prompts(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5, 3)]
    outputs = llm.generate(["a", "b", "c", "d"], params)
    assert [output.prompt for output in outputs] == ["a", "b", "c", "d"]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 5, 3]
    assert all(output.finished for output in outputs)
    numbers = [int(output.request_id) for output in outputs]
    assert numbers == sorted(set(numbers))


def test_output_has_the_shape_of_vllms(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3)
    (output,) = llm.generate("a page", params)
    (choice,) = output.outputs
    assert isinstance(choice, CompletionOutput)
    assert (choice.index, choice.finish_reason, choice.stop_reason) == (0, "length", None)
    assert choice.text == next(iter(llm._pipeline.text_models)).decode(choice.token_ids)
    assert choice.logprobs is not None
    for token_id, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        assert next(iter(entry)) == token_id
        assert [one.rank for one in entry.values()] == [1, 2, 3]
        values = [one.logprob for one in entry.values()]
        assert values == sorted(values, reverse=True)
    chosen = [entry[i].logprob for i, entry in zip(choice.token_ids, choice.logprobs, strict=True)]
    assert choice.cumulative_logprob == pytest.approx(sum(chosen))
    assert output.prompt_logprobs is None


def test_chosen_token_outside_the_top_is_listed_with_its_rank(llm: LLM) -> None:
    params = SamplingParams(temperature=2, seed=1, max_tokens=20, ignore_eos=True, logprobs=1)
    (choice,) = llm.generate("a page", params)[0].outputs
    assert choice.logprobs is not None
    lengths = set()
    for token_id, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        lengths.add(len(entry))
        assert (entry[token_id].rank == 1) == (len(entry) == 1)
    assert lengths == {1, 2} or lengths == {2}


def test_prompt_logprobs_have_an_entry_a_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    (output,) = llm.generate("the blocks of the pool", params)
    assert output.prompt_logprobs is not None
    first, *rest = output.prompt_logprobs
    assert first is None
    ids = output.prompt_token_ids[1:]
    assert [next(iter(entry or {})) for entry in rest] == ids


def test_defaults_are_vllms(llm: LLM) -> None:
    (output,) = llm.generate("a", SamplingParams(ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 16
    (output,) = llm.generate("a")
    assert len(output.outputs[0].token_ids) <= 16


def test_no_tokens_are_no_tokens(llm: LLM) -> None:
    (output,) = llm.generate("a page", SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert output.finished
    assert output.outputs[0].token_ids == []
    assert output.prompt_logprobs is not None
    assert llm.generate([]) == []


def test_end_of_sequence_ends_the_choice(llm: LLM) -> None:
    forced = SamplingParams(temperature=0, logit_bias={EOS: 100}, max_tokens=5)
    (choice,) = llm.generate("a", forced)[0].outputs
    assert (choice.token_ids, choice.text) == ([EOS], "")
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)


def test_stop_string_cuts_the_text_and_frees_the_engine(llm: LLM) -> None:
    (free,) = llm.generate("a page", GREEDY)
    text = free.outputs[0].text
    stop = text[2:4]
    cut = text[: text.index(stop)]
    base = {"temperature": 0.0, "max_tokens": 100, "ignore_eos": True, "stop": [stop]}
    (choice,) = llm.generate("a page", SamplingParams(**base))[0].outputs
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (cut, "stop", stop)
    with_stop = SamplingParams(**base, include_stop_str_in_output=True)
    assert llm.generate("a page", with_stop)[0].outputs[0].text == cut + stop
    assert state_of(llm) == (0, 0, 0.0)


def test_without_detokenizing_there_are_ids_only(llm: LLM) -> None:
    (text,) = llm.generate("a page", GREEDY)
    ids_only = msgspec.structs.replace(GREEDY, detokenize=False, logprobs=1)
    (ids,) = llm.generate("a page", ids_only)
    assert ids_of([ids]) == ids_of([text])
    assert (ids.prompt, ids.outputs[0].text) == ("a page", "")
    assert ids.outputs[0].logprobs is not None
    assert len(ids.outputs[0].logprobs) == 8


def test_stop_token_is_named(llm: LLM) -> None:
    third = ids_of(llm.generate("a page", GREEDY))[0][2]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[third])
    (choice,) = llm.generate("a page", params)[0].outputs
    assert (choice.finish_reason, choice.stop_reason) == ("stop", third)


def test_choices_are_distinct_and_reproducible(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1, seed=11, max_tokens=12, ignore_eos=True)
    (first,) = llm.generate("the tokens of", params)
    (second,) = llm.generate("the tokens of", params)
    assert [choice.index for choice in first.outputs] == [0, 1, 2]
    assert ids_of([first]) == ids_of([second])
    assert len({tuple(ids) for ids in ids_of([first])}) == 3
    alone = SamplingParams(temperature=1, seed=11, max_tokens=12, ignore_eos=True)
    assert ids_of(llm.generate("the tokens of", alone)) == ids_of([first])[:1]


def test_seeded_sampling_does_not_depend_on_the_batch(llm: LLM) -> None:
    alone = ids_of(llm.generate("the page", WARM))
    others = [f"page {i} of the table" for i in range(9)]
    assert ids_of(llm.generate(["the page", *others], WARM))[:1] == alone


def test_setting_seed_makes_unseeded_requests_reproducible(make_llm: MakeLLM) -> None:
    free = SamplingParams(max_tokens=12, ignore_eos=True)
    first, second = (ids_of(make_llm(seed=3).generate(["a", "a"], free)) for _ in range(2))
    assert first == second
    assert first[0] != first[1]


# -- chat -----------------------------------------------------------------------------------------


def test_chat_goes_through_the_template(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "the page"}], GREEDY)
    assert output.prompt == "user: the page</s>assistant: "
    assert EOS in output.prompt_token_ids
    assert ids_of(llm.generate(output.prompt, GREEDY)) == ids_of([output])


def test_several_conversations_are_a_batch(llm: LLM) -> None:
    talks = [[{"role": "user", "content": text}] for text in ("a", "b")]
    outputs = llm.chat(talks, GREEDY)
    assert [output.prompt for output in outputs] == [
        "user: a</s>assistant: ",
        "user: b</s>assistant: ",
    ]


def test_chat_options_reach_the_template(llm: LLM) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the pa"}]
    (output,) = llm.chat(talk, GREEDY, continue_final_message=True)
    assert output.prompt == "user: a</s>assistant: the pa"
    (output,) = llm.chat(talk, GREEDY, add_generation_prompt=False)
    assert output.prompt == "user: a</s>assistant: the pa</s>"


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ("", "prompt 1: the prompt is empty"),
        ({"prompt_token_ids": []}, "prompt 1: the prompt is empty"),
        ({"prompt_token_ids": [5, VOCAB_TOKENS]}, "prompt 1: .*not in the vocabulary"),
        ({"prompt_token_ids": [-1]}, "prompt 1: .*not in the vocabulary"),
        ({"prompt_token_ids": [2**40]}, "prompt_token_ids must be whole numbers"),
        ({"prompt_token_ids": ["a"]}, "prompt_token_ids must be whole numbers"),
        ({"text": "a"}, "a prompt is a string"),
        (7, "a prompt is a string"),
        ("page " * 200, "prompt 1: .*maximum context length is 128 tokens"),
    ],
)
def test_one_bad_prompt_stops_the_call_before_anything_runs(
    make_llm: MakeLLM, llm: LLM, bad: Any, sentence: str
) -> None:
    before = llm._loop.stats
    with pytest.raises(RequestError, match=sentence):
        llm.generate(["a page", bad], GREEDY)
    assert llm._loop.stats == before


def test_params_must_match_the_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 prompts came with 1 sampling_params"):
        llm.generate(["a", "b"], [GREEDY])


def test_parameters_of_another_model_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompt 0: logit_bias holds token id 9999"):
        llm.generate("a", SamplingParams(logit_bias={9999: 1.0}))


def test_template_that_refuses_is_a_request_error(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompt 1: messages must not be empty"):
        llm.chat([[{"role": "user", "content": "a"}], []], GREEDY)


def test_unknown_keyword_names_the_nearest() -> None:
    with pytest.raises(SettingsError, match=r"max_seqs .*nearest is max_num_seqs"):
        LLM("anything", max_seqs=3)


def test_tensor_parallelism_is_refused() -> None:
    with pytest.raises(SettingsError, match="tensor_parallel_size"):
        LLM("anything", tensor_parallel_size=2)


def test_missing_model_is_a_sentence() -> None:
    with pytest.raises(StartupError, match="no such model folder"):
        LLM("/nowhere/model")


# -- metrics --------------------------------------------------------------------------------------


def test_metrics_are_values_of_the_engine(make_llm: MakeLLM) -> None:
    llm = make_llm()
    llm.generate(["a page", "a table"], GREEDY)
    llm.generate(["a page"], GREEDY)
    kinds = {metric.name: type(metric) for metric in llm.get_metrics()}
    assert kinds["vllm:num_requests_running"] is Gauge
    values = {
        (metric.name, metric.labels.get("finished_reason")): metric.value
        for metric in llm.get_metrics()
        if isinstance(metric, Counter | Gauge)
    }
    assert values["vllm:num_requests_running", None] == 0
    assert values["vllm:prefix_cache_queries", None] > 0
    assert values["pagemesh_engine_requests", "length"] == 3
    [tokens] = [one for one in llm.get_metrics() if one.name == "vllm:iteration_tokens_total"]
    assert isinstance(tokens, Histogram)
    assert tokens.count == tokens.buckets["+Inf"] == sum(llm._loop.stats.steps.tokens.counts)
    assert tokens.labels["engine"] == "llm"

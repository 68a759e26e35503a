"""`LLM`: inputs, outputs, refusals, batches larger than the engine, interrupts."""

from __future__ import annotations

import _thread
import gc
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_llama import EOS, MAX_TOKENS, VOCAB_TOKENS

from pagemesh import LLM, CompletionOutput, RequestOutput, SamplingParams
from pagemesh.shared.errors import RequestError, SettingsError, StartupError
from pagemesh.shared.wire import Step, StepResult

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
WARM = SamplingParams(temperature=1, max_tokens=12, seed=7, ignore_eos=True)

MakeLLM = Callable[..., LLM]


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [choice.token_ids for output in outputs for choice in output.outputs]


def state_of(llm: LLM) -> tuple[int, int, float]:
    stats = llm._loop.stats
    return stats.running, stats.waiting, stats.kv_usage


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
    assert choice.text == llm._pipeline.text_model.decode(choice.token_ids)
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


# -- the loop -------------------------------------------------------------------------------------


def test_more_prompts_than_may_wait(make_llm: MakeLLM) -> None:
    llm = make_llm(max_waiting=2, max_num_seqs=3)
    prompts = [f"page {i}" for i in range(60)]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.prompt for output in outputs] == prompts
    assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)
    assert state_of(llm) == (0, 0, 0.0)


def test_more_choices_than_may_wait(make_llm: MakeLLM, llm: LLM) -> None:
    params = SamplingParams(n=9, seed=4, max_tokens=6, ignore_eos=True)
    small = make_llm(max_waiting=1, max_num_seqs=2)
    assert ids_of(small.generate("the pool", params)) == ids_of(llm.generate("the pool", params))


def test_answers_do_not_depend_on_how_steps_are_cut(make_llm: MakeLLM) -> None:
    prompts = ["the page table maps " * 4, "a", "blocks of the pool, page by page"]
    variants: list[dict[str, Any]] = [
        {},
        {"max_num_batched_tokens": 7},
        {"run_ahead_depth": 1},
        {"run_ahead_depth": 3},
        {"enable_prefix_caching": False},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": MAX_TOKENS},
        {"block_size": 4},
    ]
    answers = [ids_of(make_llm(**variant).generate(prompts, WARM)) for variant in variants]
    assert answers == [answers[0]] * len(variants)


def test_second_call_finds_the_prefix(make_llm: MakeLLM) -> None:
    llm = make_llm()
    prompt = "the page table maps the tokens of a sequence to the blocks of the pool, page by page"
    cold, warm = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens >= 16
    assert ids_of([cold]) == ids_of([warm])


def test_interrupt_while_delivering_leaves_it_usable(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ids_of(llm.generate(["a", "b", "c"], WARM))
    seen = []

    def interrupt(*arguments: object) -> None:
        seen.append(arguments)
        if len(seen) == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pagemesh.llm_progress.Progress.note", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b", "c"], WARM)
    assert state_of(llm) == (0, 0, 0.0)
    assert len(llm._pipeline) == 0
    assert ids_of(llm.generate(["a", "b", "c"], WARM)) == expected


def test_interrupt_while_waiting_leaves_it_usable(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes while the worker computes the third step."""
    expected = ids_of(llm.generate(["a", "b"], WARM))
    execute = llm._loop._runner.execute
    steps = []

    def interrupting(step: Step) -> StepResult:
        steps.append(step)
        if len(steps) == 3:
            _thread.interrupt_main()
        return execute(step)

    with monkeypatch.context() as patch:
        patch.setattr(llm._loop._runner, "execute", interrupting)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], WARM)
    assert state_of(llm) == (0, 0, 0.0)
    assert ids_of(llm.generate(["a", "b"], WARM)) == expected


def test_worker_that_lost_its_batch_gets_it_again(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ids_of(llm.generate(["a", "b"], WARM))
    runner = llm._loop._runner
    execute = runner.execute
    steps = []

    def forgetting(step: Step) -> StepResult:
        steps.append(step)
        if len(steps) == 4:
            runner._forget()
        return execute(step)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "execute", forgetting)
        assert ids_of(llm.generate(["a", "b"], WARM)) == expected
    assert state_of(llm) == (0, 0, 0.0)


def test_dropped_llm_ends_its_thread(make_llm: MakeLLM) -> None:
    llm = make_llm()
    llm.generate("a", GREEDY)
    (thread,) = llm._loop._thread._threads
    assert thread.is_alive()
    del llm
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_request_with_broken_numbers_fails_alone(
    make_llm: MakeLLM, tiny_folder: Path, tmp_path: Path
) -> None:
    """Token 310 has a NaN embedding; nobody else uses it."""
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(tiny_folder, tmp_path / "broken"))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][310] = float("nan")
    save_file(weights, folder / "model.safetensors")
    llm = make_llm(folder)
    broken, healthy = llm.generate([{"prompt_token_ids": [310]}, "a page"], WARM)
    assert broken.finished
    assert broken.outputs[0].finish_reason == "error"
    assert "finite" in str(broken.outputs[0].stop_reason)
    assert ids_of([healthy]) == ids_of(llm.generate("a page", WARM))


def test_progress_is_shown_unless_refused(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY)
    shown = capsys.readouterr().err
    assert "Processed prompts: 100%" in shown
    assert "2/2" in shown
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert "Processed" not in capsys.readouterr().err


# -- the package ----------------------------------------------------------------------------------


def test_package_loads_torch_only_with_the_class() -> None:
    program = (
        "import json, sys, pagemesh\n"
        "pagemesh.SamplingParams(n=2)\n"
        "before = 'torch' in sys.modules\n"
        "pagemesh.LLM\n"
        "print(json.dumps([before, 'torch' in sys.modules, 'transformers' in sys.modules]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True
    )
    assert json.loads(done.stdout) == [False, True, False]


def test_script_prints_answers_on_stdout_and_lines_on_stderr(
    tiny_folder: Path, tmp_path: Path
) -> None:
    program = (
        "from pagemesh import LLM, SamplingParams\n"
        f"llm = LLM({str(tiny_folder)!r}, cache_dir={str(tmp_path)!r}, kv_cache_memory='1MiB')\n"
        "answers = llm.generate(['a', 'b'], SamplingParams(max_tokens=3, ignore_eos=True))\n"
        "print([len(answer.outputs[0].token_ids) for answer in answers])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout == "[3, 3]\n"
    assert "memory_divided" in done.stderr


def test_package_has_no_other_names() -> None:
    import pagemesh

    assert {"LLM", "SamplingParams"} <= set(dir(pagemesh))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        pagemesh.Nothing  # noqa: B018

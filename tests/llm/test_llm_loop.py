"""The loop of `LLM`: batches larger than the engine, interrupts, failures; how it is imported."""

from __future__ import annotations

import _thread
import gc
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from llm_helpers import GREEDY, WARM, MakeLLM, ids_of, state_of
from tiny_llama import MAX_TOKENS

from pagemesh import LLM, SamplingParams
from pagemesh.scheduler_svc.errors import InvariantError
from pagemesh.shared.engine_messages import Step
from pagemesh.worker_svc.landing import Landing


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


def test_a_history_that_is_edited_answers_as_without_a_cache(make_llm: MakeLLM) -> None:
    """Known failure 61: one token changed, next to every edge of the first blocks."""
    block_tokens = 16
    histories = [[3 + i % 50 for i in range(3 * block_tokens + 1)]]
    for edge in (block_tokens, 2 * block_tokens, 3 * block_tokens):
        for place in (edge - 1, edge):
            edited = list(histories[-1])
            edited[place] += 1
            histories.append(edited)
    warm, plain = make_llm(), make_llm(enable_prefix_caching=False)
    prompts = [{"prompt_token_ids": ids} for ids in histories]
    answers = [[llm.generate(prompt, GREEDY)[0] for prompt in prompts] for llm in (warm, plain)]
    assert ids_of(answers[0]) == ids_of(answers[1])
    assert [answer.num_cached_tokens for answer in answers[0]][-2:] == [32, 48]


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
    launch = llm._loop._runner.launch
    steps = []

    def interrupting(step: Step) -> Landing:
        steps.append(step)
        if len(steps) == 3:
            _thread.interrupt_main()
        return launch(step)

    with monkeypatch.context() as patch:
        patch.setattr(llm._loop._runner, "launch", interrupting)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], WARM)
    assert state_of(llm) == (0, 0, 0.0)
    assert ids_of(llm.generate(["a", "b"], WARM)) == expected


def test_second_interrupt_while_starting_over_leaves_it_usable(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The books have steps out, and are thrown away without having been counted to the end."""
    expected = ids_of(llm.generate(["a", "b"], WARM))

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pagemesh.llm_progress.Progress.note", interrupt)
        patch.setattr(llm._loop._engine._lifecycle, "count_end", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], WARM)
    assert state_of(llm) == (0, 0, 0.0)
    assert not llm._loop._out
    assert ids_of(llm.generate(["a", "b"], WARM)) == expected


def test_worker_that_lost_its_batch_gets_it_again(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ids_of(llm.generate(["a", "b"], WARM))
    runner = llm._loop._runner
    launch = runner.launch
    steps = []

    def forgetting(step: Step) -> Landing:
        steps.append(step)
        if len(steps) == 4:
            runner._forget()
        return launch(step)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "launch", forgetting)
        assert ids_of(llm.generate(["a", "b"], WARM)) == expected
    assert state_of(llm) == (0, 0, 0.0)


@pytest.mark.parametrize("call", ["plan", "apply"])
def test_engine_that_breaks_begins_anew(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The books are left half written: a step is out, or in, that the engine does not know of."""
    expected = ids_of(llm.generate(["a", "b"], WARM))
    engine = llm._loop._engine
    sound = getattr(engine, call)
    calls: list[object] = []

    def breaking(*arguments: Any) -> Any:
        calls.append(arguments)
        outcome = sound(*arguments)
        if len(calls) == 4:
            raise InvariantError("the books disagree")
        return outcome

    with monkeypatch.context() as patch:
        patch.setattr(engine, call, breaking)
        with pytest.raises(InvariantError):
            llm.generate(["a", "b"], WARM)
    assert state_of(llm) == (0, 0, 0.0)
    assert ids_of(llm.generate(["a", "b"], WARM)) == expected


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

"""What requests say in words, as prompts and rules of token ids: options of templates, documents,
gaps, ends of long prompts, bad words, a budget of reasoning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from pipeline_driver import admit, ids_of, pipeline_of, refused
from scripts import card_of, generate, logprob_row, tokens
from small_tokenizers import byte_level_json, text_model, write_folder
from tokenizers import AddedToken, Tokenizer

from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import Prompt, PromptExtras
from pagemesh.shared.sampling import ThinkingBudget
from pagemesh.shared.structured_outputs import StructuredOutputsParams
from pagemesh.shared.wire import unpack_ids
from pagemesh.tokenizer_svc import given_templates
from pagemesh.tokenizer_svc.pipeline import Pipeline
from pagemesh.tokenizer_svc.text_model import TextModel

USER = [{"role": "user", "content": "Hi"}]
THINKER = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>"
    "{% else %}<think>{% endif %}{{ documents | length if documents }}"
)
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


def model_with(folder: Path, template: str, *added: str) -> TextModel:
    tokenizer = Tokenizer.from_str(byte_level_json().decode())
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in added])
    return text_model(folder, write_folder(folder, tokenizer.to_str().encode(), template))


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return model_with(tmp_path_factory.mktemp("thinker"), THINKER, "<think>", "</think>")


def chat(**extras: Any) -> Prompt:
    return Prompt(messages=USER, extras=PromptExtras(**extras) if extras else None)


def test_an_effort_is_a_switch_where_the_template_has_only_that(thinker: TextModel) -> None:
    assert thinker.render(chat()) == "Hi<think>"
    assert thinker.render(chat(options={"reasoning_effort": "low"})) == "Hi<think>"
    off = chat(options={"reasoning_effort": "none"})
    assert thinker.render(off) == "Hi<think></think>"
    wins = msgspec.structs.replace(off, template_kwargs={"enable_thinking": True})
    assert thinker.render(wins) == "Hi<think>"


def test_an_option_is_a_variable_of_a_template_that_has_it(tmp_path: Path) -> None:
    model = model_with(tmp_path, "{{ reasoning_effort }}-{{ verbosity }}")
    options = {"reasoning_effort": "none", "verbosity": "low"}
    assert model.render(chat(options=options)) == "none-low"


def test_documents_are_what_the_template_makes_of_them(thinker: TextModel) -> None:
    assert thinker.render(chat(documents=[{"text": "a"}, {"text": "b"}])) == "Hi<think>2"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"options": {"verbosity": "low"}}, "verbosity"),
        ({"options": {"reasoning_effort": "high"}}, "reasoning_effort"),
        ({"documents": [{"text": "a"}]}, "documents"),
    ],
)
def test_what_a_template_does_not_know_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], param: str
) -> None:
    model = model_with(tmp_path, PLAIN)
    with pytest.raises(RequestError, match=param) as caught:
        model.render(chat(**fields))
    assert (caught.value.param, caught.value.status) == (param, 400)


def test_no_thought_may_be_asked_of_a_model_that_never_thinks(tmp_path: Path) -> None:
    model = model_with(tmp_path, PLAIN)
    assert model.render(chat(options={"reasoning_effort": "none"})) == "Hi"
    thinks = model_with(tmp_path / "2", PLAIN + "<think>", "<think>", "</think>")
    with pytest.raises(RequestError, match="reasoning_effort"):
        thinks.render(chat(options={"reasoning_effort": "none"}))


def test_a_template_of_a_request_stands_in_for_the_models(byte_level: TextModel) -> None:
    given = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ eos_token }}"
    assert byte_level.render(chat(chat_template=given)) == "[Hi]</s>"
    again = msgspec.structs.replace(chat(chat_template=given), continue_final_message=True)
    assert byte_level.render(again) == "[Hi"


@pytest.mark.parametrize(
    "source",
    [
        "{% for x",
        "{{ '' | nonsense }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ 7 ** 99999 }}",
        "x" * (given_templates.MAX_TEMPLATE_CHARS + 1),
    ],
    ids=["syntax", "filter", "depth", "constant", "length"],
)
def test_a_template_of_a_request_that_cannot_be_used_is_refused(
    byte_level: TextModel, source: str
) -> None:
    with pytest.raises(RequestError, match="chat_template") as caught:
        byte_level.render(chat(chat_template=source))
    assert caught.value.param == "chat_template"


def test_a_template_of_a_request_reaches_nothing_but_its_variables(byte_level: TextModel) -> None:
    for source in ("{{ ''.__class__.__mro__ }}", "{{ cycler.__init__.__globals__ }}"):
        with pytest.raises(RequestError):
            byte_level.render(chat(chat_template=source))


def test_a_gap_is_worded_as_the_model_was_trained(tmp_path: Path) -> None:
    marks = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    model = model_with(tmp_path, PLAIN, *marks)
    prompt = Prompt(text="def f(", add_special_tokens=False, extras=PromptExtras(suffix="): pass"))
    first, gap, last = map(model.vocabulary.tokenizer.token_to_id, marks)
    ids = model.encode(prompt)
    assert (ids[0], ids[-1]) == (first, last)
    before, behind = ids[1 : ids.index(gap)], ids[ids.index(gap) + 1 : -1]
    assert (model.decode(before), model.decode(behind)) == ("def f(", "): pass")


def test_a_gap_is_refused_where_no_token_stands_for_one(pipeline: Pipeline) -> None:
    assert (
        refused(pipeline, prompt=Prompt(text="a", extras=PromptExtras(suffix="b"))).param
        == "suffix"
    )


@pytest.mark.parametrize("given", ["text", "ids"])
def test_of_a_long_prompt_the_last_tokens_count(byte_level: TextModel, given: str) -> None:
    pipeline = pipeline_of(byte_level)
    ids = ids_of(pipeline, "hello there " * 100)
    bare = generate(ids).prompt if given == "ids" else Prompt(text="hello there " * 100)

    def cut(keep: int) -> Prompt:
        return msgspec.structs.replace(bare, extras=PromptExtras(truncate_tokens=keep))

    def kept(keep: int, **fields: Any) -> list[int]:
        request = generate(cut(keep), f"r{keep}", **fields)
        admitted = pipeline.admit(request, card_of(byte_level, max_model_len=128))
        pipeline.close(request.request_id)
        assert admitted.prompt_text in (
            None,
            byte_level.decode(unpack_ids(admitted.prompt_ids), False),
        )
        return unpack_ids(admitted.prompt_ids)

    assert kept(5, want_prompt_text=True) == ids[-5:]
    assert kept(-1, max_tokens=28) == ids[-100:]
    assert kept(-1, max_tokens=None) == ids[-127:]
    assert kept(-1, max_tokens=0, prompt_logprobs=0) == ids[-128:]
    assert refused(pipeline, prompt=cut(500), max_tokens=1).code == ("context_length_exceeded")


def test_too_much_text_to_cut_is_refused(pipeline: Pipeline) -> None:
    prompt = Prompt(text="a" * (2**20 + 1), extras=PromptExtras(truncate_tokens=3))
    error = refused(pipeline, prompt=prompt)
    assert (error.status, error.param) == (413, "prompt")


def test_bad_words_are_banned_alone_and_behind_a_space(pipeline: Pipeline) -> None:
    [submit] = admit(pipeline, bad_words=["hello", " the"])
    found = submit.params.bad_word_ids or []
    for text in ("hello", " hello", "the", " the"):
        assert ids_of(pipeline, text) in found
    assert submit.params.bad_words is None
    pipeline.close(submit.request_id)
    assert refused(pipeline, bad_words=["  "]).param == "bad_words"
    assert refused(pipeline, bad_words=["a" * 1025]).param == "bad_words"
    many = [f"{n:x}" * 128 for n in range(256, 512)]
    assert refused(pipeline, bad_words=many).param == "bad_words"


@pytest.mark.parametrize("name", ["allowed_token_ids", "logprob_token_ids"])
def test_ids_outside_the_vocabulary_are_refused(pipeline: Pipeline, name: str) -> None:
    assert refused(pipeline, logprobs=1, **{name: [10**6]}).param == name


def test_more_allowed_ids_than_the_model_has_are_refused(pipeline: Pipeline) -> None:
    assert refused(pipeline, allowed_token_ids=[1] * 10**5).param == "allowed_token_ids"


def test_choices_that_are_too_much_to_send_on_are_refused(pipeline: Pipeline) -> None:
    rule = StructuredOutputsParams(json={"type": "string", "description": "a" * 200_000})
    error = refused(pipeline, n=128, structured_outputs=rule)
    assert (error.status, error.param) == (400, "n")
    admit(pipeline, n=8, structured_outputs=rule)


def test_a_budget_of_reasoning_knows_who_opens_it(thinker: TextModel) -> None:
    pipeline = pipeline_of(thinker)
    opening, closing = (ids_of(pipeline, tag) for tag in ("<think>", "</think>"))
    [begun] = admit(pipeline, prompt=chat(), thinking_token_budget=7)
    assert begun.params.thinking == ThinkingBudget(7, [], closing)
    off = chat(options={"reasoning_effort": "none"})
    [asked] = admit(pipeline, request_id="r2", prompt=off, thinking_token_budget=0)
    assert asked.params.thinking == ThinkingBudget(0, opening, closing)


def test_where_a_rule_holds_from_the_beginning_no_reasoning_is_to_be_ended(
    thinker: TextModel,
) -> None:
    rule = StructuredOutputsParams(regex="[ab]+")
    pipeline = pipeline_of(thinker)
    [behind] = admit(pipeline, prompt=chat(), thinking_token_budget=1, structured_outputs=rule)
    assert behind.params.thinking is not None
    off = chat(options={"reasoning_effort": "none"})
    fields: dict[str, Any] = {"thinking_token_budget": 1, "structured_outputs": rule}
    [at_once] = admit(pipeline, request_id="r2", prompt=off, **fields)
    assert at_once.params.thinking is None


def test_a_budget_of_reasoning_is_refused_where_none_is_marked(
    pipeline: Pipeline, thinker: TextModel
) -> None:
    assert refused(pipeline, prompt=chat(), thinking_token_budget=1).param == (
        "thinking_token_budget"
    )
    error = refused(pipeline_of(thinker), prompt="Hi", thinking_token_budget=1)
    assert error.param == "thinking_token_budget"


def test_logprobs_of_chosen_tokens_stand_behind_the_best_ones_once(pipeline: Pipeline) -> None:
    [submit] = admit(pipeline, logprobs=2, logprob_token_ids=[7, 5])
    row = logprob_row(submit.key, [9, 9, 5, 7, 5], [-1.0, -1.0, -2.0, -7.0, -2.0], 1)
    [delta] = pipeline.feed(tokens({submit.key: [9]}, logprobs=[row])).deltas
    assert delta.logprobs is not None
    found = [(token, value, rank) for token, _, _, value, rank in delta.logprobs[0].top]
    assert found == [(9, -1.0, 1), (5, -2.0, 2), (7, -7.0, 0)]


def test_the_models_limit_of_an_answer_stands_in_for_what_is_left_open(
    byte_level: TextModel,
) -> None:
    card = card_of(byte_level)._replace(defaults={"max_tokens": 50})
    pipeline = pipeline_of(byte_level)
    room = []
    for name, prompt, asked in (("a", [7] * 8, None), ("b", [7] * 100, None), ("c", [7], 60)):
        [submit] = pipeline.admit(generate(prompt, name, max_tokens=asked), card).submits
        room.append(submit.params.max_tokens)
    assert room == [50, 28, 60]

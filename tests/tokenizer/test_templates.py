"""Chat templates against transformers, and what a template may not do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_tokenizers import text_model, write_folder
from transformers import PreTrainedTokenizerFast

from pagemesh.shared.errors import RequestError, StartupError
from pagemesh.shared.messages import Prompt
from pagemesh.shared.settings import Settings
from pagemesh.tokenizer_svc import templates
from pagemesh.tokenizer_svc.templates import ChatTemplate
from pagemesh.tokenizer_svc.text_model import TextModel

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# Brackets, alternation enforced, system text folded into the first user turn.
INST = """\
{%- if messages[0]['role'] == 'system' -%}
    {%- set system = messages[0]['content'] + '\\n\\n' -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set system = '' -%}
    {%- set rest = messages -%}
{%- endif -%}
{{- bos_token -}}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('roles must alternate user/assistant') -}}
    {%- endif -%}
    {%- if message['role'] == 'user' -%}
        {{- '[INST] ' + (system if loop.first else '') + message['content'] | trim + ' [/INST]' -}}
    {%- else -%}
        {%- generation -%}
        {{- ' ' + message['content'] | trim + eos_token -}}
        {%- endgeneration -%}
    {%- endif -%}
{%- endfor -%}
"""
# Headers, tools as JSON, tool calls with arguments as objects, today's year.
HEADERS = """\
{{- bos_token }}
{%- set ns = namespace(n_tools=0) %}
{%- if tools is not none %}
    {%- for tool in tools %}
        {%- set ns.n_tools = ns.n_tools + 1 %}
        {{- tool | tojson(indent=4) }}
        {{- '\\n\\n' }}
    {%- endfor %}
{%- endif %}
{{- 'year ' + strftime_now('%Y') + ', tools ' ~ ns.n_tools }}
{%- for message in messages %}
    {%- if message.role == 'skipped' %}{% continue %}{% endif %}
    {{- '<|start_header|>' + message['role'] + '<|end_header|>\\n\\n' }}
    {%- if message.tool_calls is defined %}
        {%- for call in message.tool_calls %}
            {%- set tool = call.function %}
            {{- '{"name": "' + tool.name + '", "parameters": ' }}
            {{- tool.arguments | tojson }}
            {{- '}' }}
        {%- endfor %}
    {%- elif message.content is string %}
        {{- message.content | trim }}
    {%- endif %}
    {{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header|>assistant<|end_header|>\\n\\n' }}
{%- endif %}
"""
# Content as a string or as parts; thinking switched by a variable.
PARTS = """\
{%- for message in messages %}
    {{- '<turn>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'text' %}{{ part.text }}{% endif %}
        {%- endfor %}
    {%- endif %}
    {%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content }}{% endif %}
    {{- '</turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<turn>model\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}
{%- endif %}
"""
TEMPLATES = {"chatml": CHATML, "inst": INST, "headers": HEADERS, "parts": PARTS}
USER = {"role": "user", "content": "  What is 2 < 3 & 'this'? 世界 "}
CHATS = {
    "user": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "turns": [USER, {"role": "assistant", "content": "Yes. "}, {"role": "user", "content": "OK"}],
}
CALL = {"name": "add", "arguments": {"a": 1, "b": "é"}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


class Pair:
    """One template in our hands and in transformers'."""

    def __init__(self, ours: TextModel, theirs: PreTrainedTokenizerFast) -> None:
        self.ours = ours
        self.theirs = theirs

    def check(self, messages: list[dict[str, Any]], generation: bool, **variables: Any) -> str:
        prompt = Prompt(
            messages=messages, add_generation_prompt=generation, template_kwargs=variables
        )
        text = self.ours.render(prompt)
        assert text == self.theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation, **variables
        )
        assert (
            self.ours.encode(prompt)
            == self.theirs.apply_chat_template(
                messages, add_generation_prompt=generation, **variables
            )["input_ids"]
        )
        return text


def transformers_tokenizer(folder: Path, model: TextModel) -> PreTrainedTokenizerFast:
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        chat_template=template,
        **model.prepared.template_tokens,
    )


@pytest.fixture
def pair(request: pytest.FixtureRequest, tmp_path: Path, sentencepiece: TextModel) -> Pair:
    template = TEMPLATES[request.param]
    tokenizer_json = sentencepiece.vocabulary.tokenizer.to_str().encode()
    ours = text_model(tmp_path, write_folder(tmp_path, tokenizer_json, template))
    return Pair(ours, transformers_tokenizer(tmp_path, ours))


@pytest.mark.parametrize("generation", [False, True])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("pair", TEMPLATES, indirect=True)
def test_renders_as_transformers_does(pair: Pair, chat: str, generation: bool) -> None:
    pair.check(CHATS[chat], generation)


@pytest.mark.parametrize("generation", [False, True])
@pytest.mark.parametrize("chat", CHATS)
def test_smollm2_renders_as_transformers_does(
    smollm2: TextModel, smollm2_folder: Path, chat: str, generation: bool
) -> None:
    theirs = transformers_tokenizer(smollm2_folder, smollm2)
    text = Pair(smollm2, theirs).check(CHATS[chat], generation)
    assert text.startswith("<|im_start|>system\n")


@pytest.mark.parametrize("pair", ["headers"], indirect=True)
def test_tools_and_tool_calls_render_as_transformers_does(pair: Pair) -> None:
    calls = [{"id": "1", "type": "function", "function": CALL}]
    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "3"},
    ]
    text = pair.check(messages, True, tools=TOOLS)
    assert '{"name": "add", "parameters": {"a": 1, "b": "é"}}' in text


@pytest.mark.parametrize("pair", ["headers"], indirect=True)
def test_arguments_sent_as_json_reach_the_template_as_an_object(pair: Pair) -> None:
    def rendered(arguments: Any) -> str:
        call = {"function": {"name": "add", "arguments": arguments}}
        turn = {"role": "assistant", "content": None, "tool_calls": [call]}
        return pair.ours.render(Prompt(messages=[USER, turn]))

    assert rendered('{"a": 1, "b": "é"}') == rendered(CALL["arguments"])
    assert rendered("") == rendered({})
    assert '"parameters": "{broken"' in rendered("{broken")


@pytest.mark.parametrize("pair", ["parts"], indirect=True)
def test_variables_parts_and_reasoning_render_as_transformers_does(pair: Pair) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "x", "reasoning": "because"},
    ]
    text = pair.check(messages, True, enable_thinking=False)
    assert "one two" in text
    assert "<think>because" in text
    assert text.endswith("<think></think>")


@pytest.mark.parametrize("pair", ["chatml", "parts", "inst"], indirect=True)
@pytest.mark.parametrize("answer", ["So far", "So far "])
def test_continuing_the_last_message_matches_transformers(pair: Pair, answer: str) -> None:
    messages = [USER, {"role": "assistant", "content": answer}]
    ours = pair.ours.render(Prompt(messages=messages, continue_final_message=True))
    assert ours == pair.theirs.apply_chat_template(
        messages, tokenize=False, continue_final_message=True
    )


@pytest.mark.parametrize("pair", ["inst"], indirect=True)
def test_one_bos_from_template_and_tokenizer(pair: Pair) -> None:
    bos = pair.ours.prepared.bos_token_id
    assert pair.ours.encode(Prompt(messages=[USER])).count(bos) == 1
    assert pair.ours.encode(Prompt(text="<s>Hello")).count(bos) == 1
    assert pair.ours.encode(Prompt(text="Hello")).count(bos) == 1
    assert bos not in pair.ours.encode(Prompt(text="Hello", add_special_tokens=False))


@pytest.mark.parametrize("pair", ["inst"], indirect=True)
def test_the_templates_own_message_is_the_answer(pair: Pair) -> None:
    turns = [{"role": "assistant", "content": "first"}]
    with pytest.raises(RequestError, match="roles must alternate user/assistant") as caught:
        pair.ours.render(Prompt(messages=turns))
    assert (caught.value.status, caught.value.param) == (400, "messages")


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages[0].content + 1 }}",
        "{{ missing.field }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_whatever_a_template_raises_is_a_bad_request(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        template(source).render([USER], add_generation_prompt=False, variables={})
    assert caught.value.status == 400


@pytest.mark.parametrize("body", ["{% set x = messages[0].role %}", ""], ids=["silent", "empty"])
def test_a_render_is_bounded_in_time(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    monkeypatch.setattr(templates, "MAX_RENDER_S", 0.05)
    silent_loop = (
        "{% for a in range(99999) %}{% for b in range(99999) %}" + body + "{% endfor %}{% endfor %}"
    )
    with pytest.raises(RequestError, match="ran for more than"):
        template(silent_loop).render([USER], add_generation_prompt=False, variables={})


def test_a_render_is_bounded_in_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_RENDERED_CHARS", 1000)
    with pytest.raises(RequestError, match="exceeds 1000 characters"):
        template("{% for i in range(2000) %}x{% endfor %}").render(
            [USER], add_generation_prompt=False, variables={}
        )


def test_variables_cannot_replace_the_messages() -> None:
    text = template("{{ messages[0].content }}").render(
        [{"role": "user", "content": "mine"}],
        add_generation_prompt=False,
        variables={"messages": [{"content": "other"}]},
    )
    assert text == "mine"


def test_a_broken_template_stops_the_start() -> None:
    with pytest.raises(StartupError, match="--chat-template"):
        template("{% if %}")


def test_a_model_without_template_says_so(tmp_path: Path, byte_level: TextModel) -> None:
    tokenizer_json = byte_level.vocabulary.tokenizer.to_str().encode()
    write_folder(tmp_path, tokenizer_json, template=None)
    model = text_model(tmp_path, Settings())
    with pytest.raises(RequestError, match="no chat template"):
        model.encode(Prompt(messages=[USER]))

"""Tools on their way into prompts, and marks of parsers on their way out of the decoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from small_tokenizers import byte_level_json, sentencepiece_json, text_model, write_folder
from tokenizers import AddedToken, Tokenizer

from pagemesh.shared.messages import Prompt
from pagemesh.shared.settings import Settings
from pagemesh.shared.text_parsers import TextParsers
from pagemesh.tokenizer_svc.text_model import TextModel

PLAIN = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
PARTS = (
    "{% for m in messages %}{% for part in m.content %}{{ part.text }}\n{% endfor %}{% endfor %}"
)
HERMES = "{{ tools | tojson }}<tool_call>{% for m in messages %}{{ m | tojson }}{% endfor %}"
THINKING = PLAIN.replace("[assistant] ", "[assistant] <think>\n")
MISTRAL = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% for call in m.tool_calls or [] %}[TOOL_CALLS]{{ call.id }}"
    "{% if call.id|length != 9 %}{{ raise_exception('nine') }}{% endif %}{% endfor %}"
    "{% if m.tool_call_id %}<{{ m.tool_call_id }}>{% endif %}{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": [{"type": "text", "text": "sunny"}], "tool_call_id": "call_1"},
    {"role": "tool", "content": "warm", "tool_call_id": "call_1"},
]


def model(folder: Path, template: str, **settings: str) -> TextModel:
    written = write_folder(folder, byte_level_json(), template)
    return text_model(folder, Settings(model=replace(written.model, **settings)))


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (PLAIN, "hermes", "none"),
        (HERMES, "hermes", "none"),
        (MISTRAL, "mistral", "none"),
        ("{{ tools }}<｜tool▁calls▁begin｜> </think>", "deepseek", "think"),
        ("{{ tools }}<|python_tag|>", "llama3_json", "none"),
        ("{{ tools }} dictionary of argument name and its value", "llama3_json", "none"),
        ("{{ tools }} [func_name1(params_name1=params_value1)]", "pythonic", "none"),
        ("{{ tools }}<|python_start|>", "pythonic", "none"),
        ("{{ tools }}<tool_call><function=", "none", "none"),
        ("{{ tools }}", "json", "none"),
        (THINKING, "hermes", "think"),
        ("{{ messages }}[THINK]", "hermes", "mistral"),
    ],
)
def test_the_template_tells_the_parsers(
    tmp_path: Path, template: str, tools: str, reasoning: str
) -> None:
    assert model(tmp_path, template).parsers == TextParsers(tools, reasoning, None)


def test_settings_override_what_the_template_tells(tmp_path: Path) -> None:
    it = model(tmp_path, HERMES, tool_call_parser="json", reasoning_parser="think")
    assert it.parsers == TextParsers("json", "think", None)
    assert model(tmp_path, HERMES, tool_call_parser="none").parsers.tools == "none"


def test_a_template_that_knows_tools_gets_them(tmp_path: Path) -> None:
    text = model(tmp_path, HERMES).render(Prompt(messages=CHAT[:2], tools=TOOLS))
    assert text.startswith(json.dumps(TOOLS))
    assert '"arguments": {"city": "Paris"}' in text


def test_for_others_tools_calls_and_results_are_put_in_words(tmp_path: Path) -> None:
    text = model(tmp_path, PLAIN).render(Prompt(messages=CHAT, tools=TOOLS))
    assert text.startswith("[system] # Tools")
    assert f"<tools>\n{json.dumps(TOOLS[0])}\n</tools>" in text
    assert text.endswith(
        '[user] Hi\n[assistant] <tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n'
        "</tool_call>\n[user] <tool_response>\nsunny\n</tool_response>\n<tool_response>\nwarm\n"
        "</tool_response>\n[assistant] "
    )


def test_their_words_follow_those_of_the_system(tmp_path: Path) -> None:
    chat = [{"role": "developer", "content": "Be brief."}, *CHAT[:1]]
    text = model(tmp_path, PLAIN).render(Prompt(messages=chat, tools=TOOLS))
    assert text.startswith("[system] Be brief.\n\n# Tools")
    parts = model(tmp_path, PARTS).render(Prompt(messages=chat, tools=TOOLS))
    assert parts.startswith("Be brief.\n\n# Tools")


# In the manner of DeepSeek R1: arguments are text, and a turn with calls has no content.
TEXT_CALLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' and m.content is none %}{% for call in m.tool_calls %}"
    "{{ call.function.name + ' ' + call.function.arguments }}{% endfor %}"
    "{% else %}{{ m.content }} {% endif %}{% endfor %}"
)
# In the manner of Llama 3.1: variables that may be given, and calls one at a time.
ONE_CALL = (
    "{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}"
    "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}"
    "{%- if tools is not none %}{%- for t in tools %}{{ t | tojson(indent=4) }}{%- endfor %}"
    "{%- endif %}{%- for m in messages %}{%- if 'tool_calls' in m %}"
    "{%- if m.tool_calls|length != 1 %}{{ raise_exception('one call at a time') }}{%- endif %}"
    "{{- m.tool_calls[0].function.arguments | tojson }}{%- else %}{{ m.content }}{%- endif %}"
    "{%- endfor %}"
)


def test_calls_take_the_form_that_the_template_wants(tmp_path: Path) -> None:
    text = model(tmp_path, TEXT_CALLS).render(Prompt(messages=CHAT[:2]))
    assert text == 'Hi weather {"city": "Paris"}'
    text = model(tmp_path, ONE_CALL).render(Prompt(messages=CHAT[:2]))
    assert text == 'Hi{"city": "Paris"}'
    assert model(tmp_path, ONE_CALL).parsers.tools == "json"


def test_an_empty_list_of_calls_is_none(tmp_path: Path) -> None:
    chat = [CHAT[0], {"role": "assistant", "content": "Hello", "tool_calls": []}]
    assert model(tmp_path, ONE_CALL).render(Prompt(messages=chat)) == "HiHello"


def test_without_tools_nothing_is_added(tmp_path: Path) -> None:
    text = model(tmp_path, PLAIN).render(Prompt(messages=CHAT[:1]))
    assert text == "[user] Hi\n[assistant] "


def test_ids_are_shortened_for_a_template_that_wants_nine_characters(tmp_path: Path) -> None:
    it = model(tmp_path, MISTRAL)
    text = it.render(Prompt(messages=CHAT))
    call_id = text.removeprefix("[TOOL_CALLS]")[:9]
    assert call_id.isalnum()
    assert text == f"[TOOL_CALLS]{call_id}<{call_id}><{call_id}>"
    own = {**CALL, "id": "abcDEF123"}
    chat = [CHAT[0], {"role": "assistant", "tool_calls": [own]}]
    assert it.render(Prompt(messages=chat)) == "[TOOL_CALLS]abcDEF123"


@pytest.mark.parametrize(("template", "inside"), [(THINKING, True), (PLAIN, False)])
def test_whether_the_prompt_opens_the_reasoning(
    tmp_path: Path, template: str, inside: bool
) -> None:
    it = model(tmp_path, template, reasoning_parser="think")
    prompt = Prompt(messages=[{"role": "user", "content": "Say <think>"}])
    assert it.in_reasoning(prompt, it.text_of(prompt)) is inside
    assert not it.in_reasoning(Prompt(text="<think>"), "<think>")


@pytest.mark.parametrize("source", [byte_level_json, sentencepiece_json])
def test_marks_stay_in_the_text_where_other_special_tokens_do_not(
    tmp_path: Path, source: Any
) -> None:
    tokenizer = Tokenizer.from_buffer(source())
    tokenizer.add_special_tokens([AddedToken(mark) for mark in ("<tool_call>", "</think>")])
    settings = write_folder(tmp_path, tokenizer.to_str().encode(), THINKING)
    it = text_model(tmp_path, settings)
    think, call, user = map(tokenizer.token_to_id, ("</think>", "<tool_call>", "<|user|>"))
    assert it.parsers.reasoning_end_id == think
    for skip, keeps, expected in [
        (True, True, "</think><tool_call>"),
        (True, False, ""),
        (False, True, "</think><|user|><tool_call>"),
    ]:
        decoder = it.decoder(skip_special_tokens=skip, keeps_marks=keeps)
        text = "".join(map(decoder.push, [think, user, call])) + decoder.flush()
        assert text.replace(" ", "") == expected

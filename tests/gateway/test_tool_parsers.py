"""Tool calls in text: every format, however it is cut, and what only looks like a call."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemesh.gateway.tools.events import Arguments, CallStart, Content, Event, merged
from pagemesh.gateway.tools.json_rules import MAX_DEPTH
from pagemesh.gateway.tools.parser import GRAMMARS, ToolParser
from pagemesh.gateway.tools.scanner import MAX_CALLS

TOOLS = frozenset({"weather", "now"})
PARIS = '{"city": "Paris", "days": 3}'


def parser(name: str, **options: Any) -> ToolParser:
    ids = count()
    return ToolParser(name, TOOLS, new_id=lambda: f"id{next(ids)}", **options)


def parse(name: str, pieces: Iterable[str], **options: Any) -> list[Event]:
    it = parser(name, **options)
    events = [event for piece in pieces for event in it.feed(piece)]
    return merged([*events, *it.finish()])


def call(index: int, name: str, arguments: str) -> list[Event]:
    return [CallStart(index, f"id{index}", name), Arguments(index, arguments)]


def fenced(text: str) -> str:
    return f"```json\n{text}\n```"


def deepseek_call(name: str, arguments: str) -> str:
    return (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n{fenced(arguments)}<｜tool▁call▁end｜>"
    )


TWO = call(0, "weather", PARIS) + call(1, "now", "{}")
GOOD: list[tuple[str, str, list[Event]]] = [
    (
        "hermes",
        f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        TWO,
    ),
    (
        "hermes",
        f'<tool_call>[{{"arguments": {PARIS}, "name": "weather"}}, {{"name": "now"}}]</tool_call>',
        TWO,
    ),
    (
        "llama3_json",
        f'<|python_tag|>{{"name": "weather", "parameters": {PARIS}}}; '
        '{"type": "function", "name": "now", "parameters": {}}',
        TWO,
    ),
    (
        "json",
        fenced(f'[{{"name": "weather", "arguments": {PARIS}}}, {{"name":"now","arguments":null}}]'),
        TWO,
    ),
    (
        "mistral",
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {PARIS}}}, '
        '{"name": "now", "arguments": {}}]',
        TWO,
    ),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{PARIS}[TOOL_CALLS]now{{}}", TWO),
    (
        "deepseek",
        f"<｜tool▁calls▁begin｜>{deepseek_call('weather', PARIS)}\n{deepseek_call('now', '{}')}"
        "<｜tool▁calls▁end｜>",
        TWO,
    ),
    (
        "deepseek",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        TWO,
    ),
    ("pythonic", '[weather(city="Paris", days=3), now()]', TWO),
    ("pythonic", "<|python_start|>[weather(city='Paris',days=3),now()]<|python_end|>", TWO),
]
# Text that is no call, whole or in part.
PLAIN = [
    ("hermes", "<tool_call>"),
    ("hermes", "a < b <tool_ca"),
    ("hermes", "<tool_call>{}</tool_call>"),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "no object"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": tru'),
    ("json", '{"name": "Bob", "arguments": {}}'),
    ("json", '{"name": "weather"}'),
    ("json", '{"city": "Paris"} and ```python\nprint()\n``` and [1, 2] and `x`'),
    ("json", '{"name": "weather", "extra": 1, "arguments": {}}'),
    ("llama3_json", "<|python_tag|>print(5)"),
    ("mistral", "[TOOL_CALLS] none [TOOL_"),
    ("mistral", "[TOOL_CALLS][]"),
    ("mistral", "[1](link)"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"),
    ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\nwhat"),
    ("pythonic", "[Paris](link), [now] and [print()]"),
    ("pythonic", '[weather("Paris")]'),
    ("pythonic", "<|python_start|>now()"),
]


@pytest.mark.parametrize(("name", "text", "expected"), GOOD)
def test_every_format_is_read_however_it_is_cut(
    name: str, text: str, expected: list[Event]
) -> None:
    for size in (1, 2, 3, 7, 20, len(text)):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert parse(name, pieces) == expected


@pytest.mark.parametrize(("name", "text", "expected"), GOOD)
def test_text_around_calls_is_content_without_the_space_next_to_them(
    name: str, text: str, expected: list[Event]
) -> None:
    around = parse(name, [f"Let me see.\n\n{text}\n"])
    assert around == [Content("Let me see."), *expected]
    [*before, last] = parse(name, [f"{text} Done."])
    assert (before, last) == (expected, Content(" Done."))


@pytest.mark.parametrize(("name", "text"), PLAIN)
def test_what_is_no_call_comes_back_as_it_was(name: str, text: str) -> None:
    for size in (1, 2, 3, 7, 20, len(text)):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert parse(name, pieces) == [Content(text)]


_FRAGMENTS = sorted(
    {fragment for _, text, _ in GOOD for fragment in text.replace('"', ' " ').split(" ")}
    | {text for _, text, _ in GOOD}
    | {
        "<",
        "[",
        "{",
        "}",
        "]",
        '"',
        "\\",
        "`",
        "'",
        ",",
        ":",
        "=",
        "(",
        ")",
        "\n",
        "tru",
        "1e",
        "é",
    }
)
_TEXTS = st.lists(st.sampled_from(_FRAGMENTS) | st.text(max_size=3), max_size=12).map("".join)


@st.composite
def _cut_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A text, whole and in pieces."""
    text = draw(_TEXTS)
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=12)))
    ends = [*cuts, len(text)]
    return text, [text[a:b] for a, b in zip([0, *cuts], ends, strict=True)]


@given(st.sampled_from(sorted(GRAMMARS)), _cut_texts())
def test_no_cut_changes_what_is_read_and_nothing_is_lost(
    name: str, cut: tuple[str, list[str]]
) -> None:
    text, pieces = cut
    events = parse(name, [text])
    assert parse(name, pieces) == events
    content = "".join(event.text for event in events if isinstance(event, Content))
    if not any(isinstance(event, CallStart) for event in events):
        assert content == text
    assert _is_subsequence(content, text)
    _check_order(events)


def _is_subsequence(part: str, whole: str) -> bool:
    rest = iter(whole)
    return all(char in rest for char in part)


def _check_order(events: list[Event]) -> None:
    """Calls start one after the other, and arguments belong to the last one."""
    n_calls = 0
    for event in events:
        if isinstance(event, CallStart):
            assert event.number == n_calls
            n_calls += 1
        elif isinstance(event, Arguments):
            assert event.number == n_calls - 1


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
_OBJECTS = st.dictionaries(st.text(), _VALUES, max_size=4)


@given(_OBJECTS, st.sampled_from([None, 0, 3]), st.booleans())
def test_arguments_come_byte_for_byte(
    value: dict[str, Any], indent: int | None, ensure_ascii: bool
) -> None:
    arguments = json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)
    text = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    assert parse("hermes", text) == call(0, "weather", arguments)


@given(st.dictionaries(st.from_regex(r"[a-z_]\w{0,5}", fullmatch=True), _VALUES, max_size=4))
def test_python_literals_become_the_json_of_their_values(value: dict[str, Any]) -> None:
    keywords = ", ".join(f"{key}={item!r}" for key, item in value.items())
    start, arguments = parse("pythonic", [f"[weather({keywords})]"])
    assert isinstance(start, CallStart)
    assert isinstance(arguments, Arguments)
    assert json.loads(arguments.text) == value


def test_arguments_are_streamed_as_they_come() -> None:
    it = parser("hermes")
    assert it.feed('<tool_call>{"name": "weather", "argu') == []
    assert it.feed('ments": {"ci') == [CallStart(0, "id0", "weather"), Arguments(0, '{"ci')]
    assert it.feed('ty": "Pa') == [Arguments(0, 'ty": "Pa')]
    assert it.feed('ris"}}</tool_call>') == [Arguments(0, 'ris"}')]
    assert it.finish() == []


def test_only_a_proper_prefix_of_a_tag_is_held_back() -> None:
    it = parser("hermes")
    assert it.feed("1 <") == [Content("1")]
    assert it.feed(" 2 <tool_call") == [Content(" < 2")]
    assert it.feed("ing> ") == [Content(" <tool_calling>")]
    assert it.finish() == [Content(" ")]


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": tru', '{"a": tru'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "x\\u00', '{"a": "x\\u00'),
        ("mistral", '[TOOL_CALLS]now{"a": 1', '{"a": 1'),
        ("pythonic", '[now(a="x', '{"a": "x'),
        ("json", '{"name": "now", "arguments": {"a": [', '{"a": ['),
    ],
)
def test_a_call_that_is_cut_keeps_what_there_is(name: str, text: str, arguments: str) -> None:
    assert parse(name, [text]) == call(0, "now", arguments)


def test_what_goes_wrong_in_the_arguments_leaves_the_rest_as_content() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": 1,}}</tool_call> Hm.'
    assert parse("hermes", text) == [*call(0, "now", '{"a": 1,'), Content("}}</tool_call> Hm.")]


def test_a_tag_that_is_never_closed_is_no_harm() -> None:
    one = '<tool_call>{"name": "now", "arguments": {}}'
    assert parse("hermes", one) == call(0, "now", "{}")
    assert parse("hermes", f"{one}\n{one}") == call(0, "now", "{}") + call(1, "now", "{}")


def test_a_line_break_within_a_string_is_escaped() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": "one\ntwo\t"}}</tool_call>'
    assert parse("hermes", text) == call(0, "now", '{"a": "one\\ntwo\\t"}')


def test_arguments_within_a_string_are_taken_out_of_it() -> None:
    text = '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert parse("hermes", text) == call(0, "now", '{"a": 1}')


def test_only_the_first_call_is_told_if_calls_may_not_be_parallel() -> None:
    name, text, _ = GOOD[0]
    assert parse(name, text, max_calls=1) == call(0, "weather", PARIS)


@pytest.mark.parametrize("name", ["hermes", "pythonic"])
def test_nesting_and_number_of_calls_are_bounded(name: str) -> None:
    deep = "[" * (MAX_DEPTH * 50)
    texts = {
        "hermes": (
            f'<tool_call>{{"name": "now", "arguments": {{"a": {deep}',
            '<tool_call>{"name": "now"}</tool_call>',
        ),
        "pythonic": (f"[now(a={deep}", "[now()]"),
    }
    nested, one = texts[name]
    start, arguments, rest = parse(name, [nested])
    assert (start, arguments.text.count("[")) == (
        CallStart(0, "id0", "now"),
        MAX_DEPTH - (name == "hermes"),
    )
    assert isinstance(rest, Content)
    events = parse(name, [one * (MAX_CALLS + 1)])
    assert sum(isinstance(event, CallStart) for event in events) == MAX_CALLS
    assert events[-1] == Content(one)

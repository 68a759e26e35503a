"""Reasoning in front of an answer, however the text is cut, and its tokens."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemesh.gateway.tools.events import CallStart, Content, Event, Reasoning, merged
from pagemesh.gateway.tools.parser import AnswerParser, ToolParser
from pagemesh.gateway.tools.reasoning import ReasoningSplit, ReasoningTokens
from pagemesh.shared.messages import Delta
from pagemesh.shared.wire import pack_ids
from pagemesh.tokenizer_svc.stops import StopFilter

TAGS = "<think>", "</think>"
END_ID = 7


def split(pieces: Iterable[str], *, inside: bool = False) -> list[Event]:
    it = ReasoningSplit(*TAGS, inside=inside)
    events = [event for piece in pieces for event in it.feed(piece)]
    return merged([*events, *it.finish()])


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nHi", False, [Reasoning("Hm."), Content("Hi")]),
        ("Hm.</think>Hi", True, [Reasoning("Hm."), Content("Hi")]),
        ("\n<think>a</think>b<think>c", False, [Reasoning("a"), Content("b<think>c")]),
        ("<think>\n\n</think>\n\nHi", False, [Content("Hi")]),
        ("Hi <think>", False, [Content("Hi <think>")]),
        (" <thin", False, [Content(" <thin")]),
        ("<think>cut </thi", False, [Reasoning("cut </thi")]),
        ("Hi </think> there", False, [Content("Hi </think> there")]),
        ("still thinking", True, [Reasoning("still thinking")]),
        ("", True, []),
    ],
)  # fmt: skip
def test_reasoning_opens_an_answer(text: str, inside: bool, expected: list[Event]) -> None:
    for size in range(1, max(len(text), 1) + 1):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert split(pieces, inside=inside) == expected


_FRAGMENTS = st.sampled_from(["<think>", "</think>", "<", "/", "think>", "</", "\n", " ", "a"])


@given(st.lists(_FRAGMENTS, max_size=12), st.booleans())
def test_no_cut_changes_what_is_read(fragments: list[str], inside: bool) -> None:
    text = "".join(fragments)
    whole = split([text], inside=inside)
    assert split(fragments, inside=inside) == whole
    assert split(text, inside=inside) == whole
    kept = "".join(event.text for event in whole)  # type: ignore[union-attr]
    bare = text.replace("<think>", "", 1).replace("</think>", "", 1)
    assert len("".join(kept.split())) >= len("".join(bare.split()))


@given(st.lists(_FRAGMENTS, max_size=12), st.sets(_FRAGMENTS, min_size=1), st.booleans())
def test_a_stop_string_near_a_tag_loses_and_moves_nothing(
    fragments: list[str], stops: set[str], inside: bool
) -> None:
    """Known failure 12. What the filter holds back reaches the parser in the end."""
    text = "".join(fragments)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    filtered = StopFilter(sorted(stops))
    pieces = [*map(filtered.push, fragments), filtered.flush()]
    shown = "".join(pieces)
    assert text.startswith(shown)
    assert len(shown) < min(ends) if ends else shown == text
    assert split(pieces, inside=inside) == split([shown], inside=inside)


def test_calls_are_looked_for_behind_the_reasoning_only() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    tools = ToolParser("hermes", {"f"}, new_id=lambda: "id")
    it = AnswerParser(ReasoningSplit(*TAGS, inside=False), tools)
    events = merged([*it.feed(f"<think>{call}</think>\n\n{call}"), *it.finish()])
    assert events[:2] == [Reasoning(call), CallStart(0, "id", "f")]


def count_tokens(
    tokens: list[tuple[int, str]], size: int, end_id: int | None, *, inside: bool = False
) -> int:
    it, counted = ReasoningSplit(*TAGS, inside=inside), ReasoningTokens(end_id)
    for i in range(0, len(tokens), size):
        part = tokens[i : i + size]
        gain = Delta("r", 0, "".join(text for _, text in part), pack_ids(t for t, _ in part))
        it.feed(gain.text)
        counted.add(gain, it)
    return counted.count


THOUGHT = [(1, "<think>"), (2, "Hm"), (2, "."), (END_ID, "</think>"), (3, "Hi"), (3, " all")]


def test_tokens_are_counted_to_the_one_that_ends_the_reasoning() -> None:
    for size in range(1, 7):
        assert count_tokens(THOUGHT, size, END_ID) == 4
        assert count_tokens(THOUGHT[1:], size, END_ID, inside=True) == 3
        assert count_tokens(THOUGHT[:3], size, END_ID) == 3
        assert count_tokens(THOUGHT[4:], size, END_ID) == 0


def test_without_such_a_token_pieces_count_by_their_characters() -> None:
    tokens = [(1, "<think>"), (2, "Hm."), (3, "</thi"), (3, "nk>"), (3, "Hi"), (3, " all")]
    assert count_tokens(tokens, 1, None) == 4
    assert 3 <= count_tokens(tokens, 6, None) <= 5

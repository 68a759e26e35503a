"""Stop strings over any chunking."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagemesh.tokenizer_svc.stops import StopEnds, StopFilter
from pagemesh.tokenizer_svc.text_model import TextModel

few_letters = st.text(alphabet="abc", max_size=12)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4)


def run(stops: list[str], chunks: list[str], *, include: bool = False) -> tuple[str, str | None]:
    """What is shown in all, and the stop string that matched."""
    stop_filter = StopFilter(stops, include_stop=include)
    shown = "".join(stop_filter.push(chunk) for chunk in chunks)
    if stop_filter.matched is None:
        shown += stop_filter.flush()
    return shown, stop_filter.matched


def reference(stops: list[str], text: str, *, include: bool) -> tuple[str, str | None]:
    """Read one character at a time and look whether a stop string just ended."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(stops=stop_lists, chunks=st.lists(few_letters, max_size=6), include=st.booleans())
def test_any_chunking_gives_what_reading_by_character_gives(
    stops: list[str], chunks: list[str], include: bool
) -> None:
    expected = reference(stops, "".join(chunks), include=include)
    assert run(stops, chunks, include=include) == expected


@given(stops=stop_lists, chunks=st.lists(few_letters, max_size=6))
def test_only_a_proper_prefix_of_a_stop_string_is_held_back(
    stops: list[str], chunks: list[str]
) -> None:
    stop_filter = StopFilter(stops)
    shown = given_so_far = ""
    for chunk in chunks:
        shown += stop_filter.push(chunk)
        given_so_far += chunk
        if stop_filter.matched is not None:
            return
        held = given_so_far[len(shown) :]
        assert given_so_far.startswith(shown)
        assert held == "" or any(s.startswith(held) and s != held for s in stops)


def test_stop_string_over_several_chunks_never_leaks() -> None:
    stop_filter = StopFilter(["DEFGHIJ"])
    shown = [stop_filter.push(chunk) for chunk in ("ABC", "DEF", "G", "HI", "J", "KLM")]
    assert shown == ["ABC", "", "", "", "", ""]
    assert stop_filter.matched == "DEFGHIJ"


def test_stop_string_inside_a_chunk_is_found() -> None:
    assert run(["DE"], ["ABC", "DEF"]) == ("ABC", "DE")


def test_false_start_is_released_as_soon_as_it_fails() -> None:
    stop_filter = StopFilter(["STOP!"])
    assert [stop_filter.push(c) for c in ("go ST", "O", "P", "?")] == ["go ", "", "", "STOP?"]


def test_held_text_comes_out_at_the_end() -> None:
    assert run(["###"], ["a##"]) == ("a##", None)


@pytest.mark.parametrize(("include", "shown"), [(False, "one "), (True, "one two")])
def test_stop_string_is_shown_when_asked_for(include: bool, shown: str) -> None:
    assert run(["two"], ["one t", "wo three"], include=include) == (shown, "two")


def test_no_stop_strings_hold_nothing() -> None:
    assert StopFilter([]).push("abc") == "abc"


@pytest.mark.parametrize("model", ["smollm2", "sentencepiece"])
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_stop_string_ends_only_in_a_token_where_it_may(
    model: str, data: st.DataObject, request: pytest.FixtureRequest
) -> None:
    it: TextModel = request.getfixturevalue(model)
    text = data.draw(st.text(alphabet="ab c\n世é", min_size=1, max_size=12))
    stops = data.draw(st.lists(st.sampled_from(text), min_size=1, max_size=2))
    ends = StopEnds(stops, it.vocabulary, skip_special_tokens=True)
    stop_filter, decoder = StopFilter(stops), it.decoder(skip_special_tokens=True)
    ids = it.vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
    for token_id in ids:
        stop_filter.push(decoder.push(token_id))
        if stop_filter.matched is not None:
            assert ends[token_id]
            return


def test_most_tokens_end_no_stop_string(smollm2: TextModel) -> None:
    ends = StopEnds(["User:"], smollm2.vocabulary, skip_special_tokens=True)
    encode = smollm2.vocabulary.tokenizer.encode
    assert [ends[i] for i in encode("the page", add_special_tokens=False).ids] == [False, False]
    assert ends[encode(":", add_special_tokens=False).ids[0]]

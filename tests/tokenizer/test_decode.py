"""Incremental decoding against the reference decoding of all ids."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pagemesh.tokenizer_svc.text_model import TextModel

MODELS = ["smollm2", "byte_level", "sentencepiece", "metaspace"]
TEXTS = [
    "Hello world",
    " leading space",
    "  two spaces",
    "世界 and 你好, 😀😀 👩‍👩‍👧 naïve",
    "tabs\tand\nnew\n\nlines \n",
    "\ufffd real replacement \ufffd",
    "ends inside 世",
    "",
]
any_model = pytest.mark.parametrize("model", MODELS)
# Session fixtures hold no state that an example could change.
many = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def pieces(model: TextModel, ids: list[int], *, skip: bool) -> list[str]:
    decoder = model.decoder(skip_special_tokens=skip)
    return [*(decoder.push(token_id) for token_id in ids), decoder.flush()]


@cache
def single_byte_ids(model: TextModel) -> list[int]:
    return [
        i for i in range(model.prepared.vocab_tokens) if len(model.vocabulary.token_bytes(i)) == 1
    ]


@any_model
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_of_an_encoded_text_join_to_it(
    model: str, text: str, request: pytest.FixtureRequest
) -> None:
    it: TextModel = request.getfixturevalue(model)
    ids = it.vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(pieces(it, ids, skip=True)) == it.decode(ids)


@any_model
@many
@given(data=st.data())
def test_pieces_of_any_ids_join_to_the_reference(
    model: str, data: st.DataObject, request: pytest.FixtureRequest
) -> None:
    it: TextModel = request.getfixturevalue(model)
    ids = data.draw(st.lists(st.integers(0, it.prepared.vocab_tokens - 1), max_size=40))
    skip = data.draw(st.booleans())
    assert "".join(pieces(it, ids, skip=skip)) == it.decode(ids, skip)


@any_model
@many
@given(data=st.data())
def test_many_at_once_give_what_each_gives(
    model: str, data: st.DataObject, request: pytest.FixtureRequest
) -> None:
    it: TextModel = request.getfixturevalue(model)
    some = st.integers(0, it.prepared.vocab_tokens - 1) | st.sampled_from(single_byte_ids(it))
    parts = data.draw(st.lists(st.lists(some, max_size=12), max_size=4))
    skip = data.draw(st.booleans())
    each, many = (it.decoder(skip_special_tokens=skip) for _ in range(2))
    for ids in parts:
        assert many.push_many(ids) == "".join(map(each.push, ids))
    assert many.flush() == each.flush()


@pytest.mark.parametrize("model", ["smollm2", "byte_level", "sentencepiece"])
@many
@given(data=st.data())
def test_pieces_of_any_bytes_join_to_the_reference(
    model: str, data: st.DataObject, request: pytest.FixtureRequest
) -> None:
    """Ids of single bytes: every way to break a character."""
    it: TextModel = request.getfixturevalue(model)
    ids = data.draw(st.lists(st.sampled_from(single_byte_ids(it)), max_size=30))
    assert "".join(pieces(it, ids, skip=True)) == it.decode(ids)


@pytest.mark.parametrize("model", ["smollm2", "byte_level", "sentencepiece"])
@many
@given(text=st.text(max_size=30))
def test_a_whole_text_never_shows_a_replacement_character(
    model: str, text: str, request: pytest.FixtureRequest
) -> None:
    it: TextModel = request.getfixturevalue(model)
    clean = text.replace("\ufffd", "")
    ids = it.vocabulary.tokenizer.encode(clean, add_special_tokens=False).ids
    # Some vocabularies lack rare bytes: then the reference shows the replacement as well.
    assume("\ufffd" not in it.decode(ids))
    assert not any("\ufffd" in piece for piece in pieces(it, ids, skip=True))


@pytest.mark.parametrize("model", ["smollm2", "byte_level", "sentencepiece"])
def test_half_a_character_shows_at_the_very_end_only(
    model: str, request: pytest.FixtureRequest
) -> None:
    it: TextModel = request.getfixturevalue(model)
    ids = it.vocabulary.tokenizer.encode("ab\U0001f9ff", add_special_tokens=False).ids[:-1]
    *shown, last = pieces(it, ids, skip=True)
    assert "".join(shown) == "ab"
    # The reference shows one for the whole character, or one for each fallback byte of it.
    assert last == ("\ufffd\ufffd\ufffd" if model == "sentencepiece" else "\ufffd")


def test_text_is_shown_as_soon_as_it_is_certain(smollm2: TextModel) -> None:
    ids = smollm2.vocabulary.tokenizer.encode("Hi 世界 there").ids
    shown = pieces(smollm2, ids, skip=True)
    assert shown[0] == "Hi"
    assert shown[-1] == ""
    assert shown.index("界") < len(shown) - 2


def test_ids_without_a_token_are_silent(sentencepiece: TextModel, byte_level: TextModel) -> None:
    for model in (sentencepiece, byte_level):
        rowless = model.prepared.vocab_tokens - 1
        assert pieces(model, [rowless, rowless], skip=False) == ["", "", ""]


def test_token_bytes_keep_leading_space_and_half_characters(
    byte_level: TextModel, sentencepiece: TextModel
) -> None:
    for model in (byte_level, sentencepiece):
        ids = model.vocabulary.tokenizer.encode("a 😀", add_special_tokens=False).ids
        assert b"".join(map(model.vocabulary.token_bytes, ids)).endswith(b"a \xf0\x9f\x98\x80")
        assert "\ufffd" in model.token_str(ids[-1])
        assert model.token_str(1) == "<s>"

"""What a text model knows about texts before and after encoding them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import byte_level_json, text_model, write_folder

from pagemesh.shared.errors import RequestError, StartupError
from pagemesh.shared.messages import Prompt
from pagemesh.shared.wire import pack_ids
from pagemesh.tokenizer_svc.text_model import TextModel


@given(text=st.text(max_size=40).map(lambda text: text * 20))
def test_no_text_has_fewer_tokens_than_its_bound(
    byte_level: TextModel, smollm2: TextModel, text: str
) -> None:
    for model in (byte_level, smollm2):
        n_tokens = len(model.vocabulary.tokenizer.encode(text).ids)
        assert model.vocabulary.min_tokens(text) <= n_tokens


def test_bytes_without_a_token_count_for_nothing(smollm2: TextModel) -> None:
    """SmolLM2 has no token for the byte 0xF1, which begins this character."""
    text = "\U00040000" * 10_000
    n_tokens = len(smollm2.vocabulary.tokenizer.encode(text).ids)
    assert n_tokens < len(text.encode())
    assert smollm2.vocabulary.min_tokens(text) <= n_tokens


def test_the_bound_is_of_use(byte_level: TextModel, smollm2: TextModel) -> None:
    for model in (byte_level, smollm2):
        assert model.vocabulary.min_tokens("x" * 2**20) > 2**10


def test_a_normalising_tokenizer_sets_no_bound(sentencepiece: TextModel) -> None:
    assert sentencepiece.vocabulary.min_tokens("x" * 2**20) == 0


def test_ids_that_are_no_int32_are_a_bad_request(byte_level: TextModel) -> None:
    with pytest.raises(RequestError) as caught:
        byte_level.encode(Prompt(token_ids=b"\x01\x02\x03"))
    assert (caught.value.status, caught.value.param) == (400, "prompt")


def test_ids_pass_as_they_are(byte_level: TextModel) -> None:
    assert byte_level.encode(Prompt(token_ids=pack_ids([1, 1, 2]))) == [1, 1, 2]


@pytest.mark.parametrize("content", [b"", b"{}", b"not json"])
def test_a_damaged_tokenizer_stops_the_start(tmp_path: Path, content: bytes) -> None:
    settings = write_folder(tmp_path, byte_level_json())
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(StartupError, match="prepare again"):
        text_model(tmp_path, settings)


def test_a_missing_tokenizer_stops_the_start(tmp_path: Path) -> None:
    settings = write_folder(tmp_path, byte_level_json())
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(StartupError, match="pagemesh prepare"):
        text_model(tmp_path, settings)

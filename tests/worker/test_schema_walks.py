"""Whatever schema a client writes: an answer drawn at random among the tokens that its rule allows
is valid by another's judgement, once it ends. The vocabulary is the real model's."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import example, given, note, settings
from hypothesis import strategies as st
from json_schemas import SCHEMAS, TREES, Schema
from jsonschema import Draft202012Validator, FormatChecker
from tokenizers import Tokenizer

from pagemesh.shared.grammar import CompiledRules, GrammarError, GrammarVocabulary
from pagemesh.shared.structured_outputs import StructuredOutputsParams
from pagemesh.worker_svc.grammar_masks import fill_masks, mask_words

pytestmark = pytest.mark.model
VOCAB, EOS = 49_152, 2
MOST_TOKENS, WANDER_TOKENS = 600, 40
CLOSERS = ('"', "}", "]", "0", "1", ",", ":", "e", "a", "b", "-", "T", "Z", ".", "@")


class Walker:
    """Draws among what is allowed: at random for a while, then what closes what is open."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.rules = CompiledRules(GrammarVocabulary(folder, VOCAB, [EOS]))
        self.closers = [self.tokenizer.token_to_id(text) for text in CLOSERS]

    def answer(self, schema: Schema, random: Random) -> str | None:
        """None if it goes on for ever. Raises GrammarError for a schema that is refused."""
        matcher = self.rules.matcher(StructuredOutputsParams(json=schema))
        masks, ids = np.empty((1, mask_words(VOCAB)), np.int32), list[int]()
        while len(ids) < MOST_TOKENS:
            fill_masks([matcher], masks)
            assert matcher.fault is None, (schema, self.tokenizer.decode(ids))
            token = self._draw(masks, len(ids), random)
            if token == EOS:
                return str(self.tokenizer.decode(ids, skip_special_tokens=False))
            ids.append(token)
            matcher.advance(token)
        return None

    def _draw(self, masks: np.ndarray, n_tokens: int, random: Random) -> int:
        bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
        if bits[EOS] and random.random() < 0.5:
            return EOS
        if n_tokens > WANDER_TOKENS:
            for closer in self.closers:
                if bits[closer]:
                    return closer
        return int(random.choice(np.flatnonzero(bits)))


@pytest.fixture(scope="module")
def walker(smollm2_folder: Path) -> Walker:
    return Walker(smollm2_folder)


def is_valid(schema: Schema, text: str) -> bool:
    checker = FormatChecker(["uuid", "ipv4"])  # of dates Python knows fewer than RFC 3339
    return Draft202012Validator(schema, format_checker=checker).is_valid(json.loads(text))


@settings(max_examples=100, deadline=None)
@example(schema=TREES, seed=1)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_an_answer_that_ends_is_valid(walker: Walker, schema: Schema, seed: int) -> None:
    try:
        text = walker.answer(schema, Random(seed))
    except GrammarError as error:
        note(f"refused: {error.reason}")
        return
    assert text is None or is_valid(schema, text), text


def test_answers_do_end_and_schemas_are_taken(walker: Walker) -> None:
    """So that the test above is one."""
    texts = [walker.answer(TREES, Random(seed)) for seed in range(10)]
    assert sum(text is not None for text in texts) >= 5


def test_white_space_has_an_end(walker: Walker) -> None:
    matcher = walker.rules.matcher(StructuredOutputsParams(json=TREES))
    matcher.consume(walker.tokenizer.encode("{" + 64 * "\n").ids)
    with pytest.raises(GrammarError):
        matcher.consume(walker.tokenizer.encode("\n").ids)

"""Engines that share a name, or a vocabulary, and would answer differently."""

from __future__ import annotations

import pytest
from test_dispatch import ASK, CARD, choose, engine

from pagemesh.shared.messages import ModelCard
from pagemesh.tokenizer_svc.dispatch import Dispatch, Need, Place
from pagemesh.tokenizer_svc.variants import card_of_name, variants_of

INT8 = CARD._replace(quantization="int8")
HALF = CARD._replace(dtype="bfloat16")
OTHER = CARD._replace(names=["other"], fingerprint="beef", max_model_len=999)


def test_a_name_is_its_own_engines_alone() -> None:
    assert card_of_name("m", [OTHER, CARD]) == CARD
    assert card_of_name("other", [OTHER, CARD]) == OTHER
    assert card_of_name("nobody", [OTHER, CARD]) is None


def test_weights_of_one_fingerprint_under_two_names_are_two_models() -> None:
    small = INT8._replace(names=["m-int8"])
    assert card_of_name("m-int8", [CARD, small]) == small
    assert card_of_name("m", [small]) is None


@pytest.mark.parametrize(
    ("cards", "in_use"),
    [
        ([INT8, CARD], CARD),  # of equals, the one that is not quantized
        ([INT8, INT8, CARD], INT8),  # most engines
        ([CARD, HALF], HALF),  # by name
    ],
)
def test_one_variant_of_a_name_is_in_use(cards: list[ModelCard], in_use: ModelCard) -> None:
    for order in (cards, cards[::-1]):
        assert card_of_name("m", order) == in_use
        assert variants_of("m", order)[0] == in_use.variant
        assert len(variants_of("m", order)) == 2


def test_a_request_stays_with_its_variant() -> None:
    dispatch = Dispatch()
    dispatch.update("s", [engine("full", CARD, load=99), engine("idle", INT8)])
    assert ASK.need == Need(16, 10, CARD.variant)
    assert choose(dispatch) == Place("s", "full")
    dispatch.update("s", [engine("idle", INT8)])
    assert choose(dispatch) is None
    assert dispatch.card("m") == INT8

"""Engines of one name that would answer differently: which of them serve it. Pure.

Two workers may keep the same weights in other types, or other files may bear one name. A request
never goes from one variant to another; here it is decided which one takes the new ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pagemesh.shared.messages import ModelCard, Variant


def variants_of(name: str, cards: Iterable[ModelCard]) -> list[Variant]:
    """The variants that engines serve as `name`, the one in use first: that of most engines, of
    equals one whose weights are not quantized, then by name. All who see the same engines agree."""
    engines = Counter(card.variant for card in cards if name in card.names)
    return sorted(engines, key=lambda each: (-engines[each], each.quantization != "none", each))


def card_of_name(name: str, cards: Iterable[ModelCard]) -> ModelCard | None:
    """Of the variant in use, the card with the longest context."""
    cards = list(cards)
    in_use = variants_of(name, cards)[:1]
    serving = (card for card in cards if name in card.names and card.variant in in_use)
    return max(serving, key=lambda card: card.max_model_len, default=None)

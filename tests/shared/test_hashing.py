"""The hash chain's binary layout is an interface between processes of different age."""

from __future__ import annotations

import struct
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemesh.shared.hashing import CHAIN_START, chain_hashes, split_hashes
from pagemesh.shared.wire import pack_ids

BLOCK_TOKENS = 4
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@pytest.mark.parametrize(
    ("options", "golden"),
    [
        ({}, ["206edb31760756de8ad76f30a1676152", "923c4532726253a73532336efbca357b"]),
        (
            {"salt": "tenant"},
            ["293b5007bd07f5e8b23b758d720ad44f", "62d896d884acaa0d625b37c8c7c59cff"],
        ),
        (
            {"adapter": "lora"},
            ["22d78d1e636ef392c648fa38e465c73f", "05f16abf96c8c474fc975aa713172ced"],
        ),
        (
            {"adapter": "lora", "salt": "tenant"},
            ["0c24e3708a02cf9bc7dd96d426915d6a", "02354e1aec9eb1f3100d7bbe0b590e2a"],
        ),
    ],
)
def test_golden_vectors(options: dict[str, str], golden: list[str]) -> None:
    hashes = chain_hashes(pack_ids(range(8)), BLOCK_TOKENS, **options)
    assert [digest.hex() for digest in hashes] == golden


def test_layout_is_parent_then_little_endian_ids() -> None:
    (first,) = chain_hashes(pack_ids([1, 2, 3, 4]), BLOCK_TOKENS)
    assert first == blake2b(bytes(16) + struct.pack("<4i", 1, 2, 3, 4), digest_size=16).digest()


@given(TOKENS, st.integers(0, 10))
def test_a_chain_goes_on_from_any_block(tokens: list[int], split_blocks: int) -> None:
    whole = chain_hashes(pack_ids(tokens), BLOCK_TOKENS, salt="s")
    head = tokens[: split_blocks * BLOCK_TOKENS]
    first = chain_hashes(pack_ids(head), BLOCK_TOKENS, salt="s")
    parent = first[-1] if first else CHAIN_START
    rest = chain_hashes(pack_ids(tokens[len(head) :]), BLOCK_TOKENS, parent=parent, salt="s")
    assert first + rest == whole


@given(st.lists(st.integers(0, 99), min_size=12, max_size=12), st.integers(0, 11))
def test_one_changed_token_changes_every_later_hash(tokens: list[int], at: int) -> None:
    changed = [*tokens]
    changed[at] += 1
    before = chain_hashes(pack_ids(tokens), BLOCK_TOKENS)
    after = chain_hashes(pack_ids(changed), BLOCK_TOKENS)
    block = at // BLOCK_TOKENS
    assert before[:block] == after[:block]
    assert not set(before[block:]) & set(after[block:])


def test_adapter_and_salt_cannot_trade_characters() -> None:
    ids = pack_ids(range(4))
    assert chain_hashes(ids, 4, adapter="ab", salt="c") != chain_hashes(
        ids, 4, adapter="a", salt="bc"
    )


def test_packed_hashes_split_again() -> None:
    hashes = chain_hashes(pack_ids(range(16)), BLOCK_TOKENS)
    assert split_hashes(b"".join(hashes)) == hashes

"""What the index is told: whatever happens to the calls, it comes to say what the engine holds."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from pagemesh.scheduler_svc.block_lists import MAX_NOTED, Block, ContentMap
from pagemesh.scheduler_svc.publish import MAX_BLOCKS, Change, Publication, Section
from pagemesh.shared.messages import ModelCard
from pagemesh.shared.prefix_index import N_FIRST, index_keys

CARD: Final = ModelCard(["m"], 100, 4096, 4, "float32", [2], 1, "f00d", 1)
CONTENTS: Final = [blake2b(bytes([n]), digest_size=16).digest() for n in range(40)]


def keys_of(packed: bytes) -> set[bytes]:
    return {packed[i : i + 8] for i in range(0, len(packed), 8)}


class Index:
    """What Redis holds of one engine. `most` second bytes are looked at in a call."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()

    def publish(self, change: Change) -> None:
        self.keys = (self.keys | keys_of(change.added)) - keys_of(change.removed)

    def rewrite(self, section: Section, most: int) -> int:
        end = min(section.second + most, N_FIRST)

        def there(key: bytes) -> bool:
            return key[0] == section.first and section.second <= key[1] < end

        self.keys = {key for key in self.keys if not there(key)}
        self.keys |= {key for key in keys_of(section.held) if there(key)}
        return end


class Publishing(RuleBasedStateMachine):
    """Blocks come and go, calls are dropped, doubled and cut short, the index is flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.index = ContentMap(), Index()
        self.publication = Publication(CARD, lambda: self.map)
        self.blocks: list[Block] = []

    def held(self) -> set[bytes]:
        return keys_of(index_keys(b"".join(b.hash for b in self.blocks if b.hash), CARD))

    @rule(content=st.sampled_from(CONTENTS))
    def cached(self, content: bytes) -> None:
        self.blocks.append(Block(len(self.blocks)))
        self.map.add(self.blocks[-1], content)

    @rule(which=st.integers(0, 99))
    def evicted(self, which: int) -> None:
        if self.blocks:
            self.map.discard(self.blocks.pop(which % len(self.blocks)))

    @rule(times=st.integers(1, 2))
    def told(self, times: int) -> None:
        change = self.publication.take()
        for _ in range(times):
            self.index.publish(change)

    @rule(arrived=st.booleans())
    def call_failed(self, arrived: bool) -> None:
        change = self.publication.take()
        if arrived:
            self.index.publish(change)
        self.publication.lost(change)

    @rule()
    def flushed(self) -> None:
        self.index.keys.clear()
        self.publication.doubt()

    @rule()
    def books_replaced(self) -> None:
        self.map, self.blocks = ContentMap(), []

    @rule(most=st.integers(1, N_FIRST))
    def walked(self, most: int) -> None:
        section = self.publication.section()
        self.publication.walked(self.index.rewrite(section, most))

    def teardown(self) -> None:
        """From now on everything goes well: the index comes to say what is true, and stays so."""
        self.told(1)
        for _ in range(N_FIRST + 1):
            if self.publication.hurried:
                self.walked(N_FIRST)
        assert not self.publication.hurried
        assert self.index.keys == self.held()


TestPublishing = Publishing.TestCase
TestPublishing.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_a_walk_in_a_hurry_ends() -> None:
    publication = Publication(CARD, ContentMap)
    publication.doubt()
    for n in range(N_FIRST):
        assert publication.hurried, n
        publication.walked(N_FIRST)
    assert not publication.hurried


def test_what_came_and_went_between_two_calls_is_said_once() -> None:
    contents = ContentMap()
    publication = Publication(CARD, lambda: contents)
    twins = [Block(1), Block(2), Block(3)]
    for block in twins:
        contents.add(block, CONTENTS[0])
    assert publication.take() == Change(index_keys(CONTENTS[0], CARD), b"")
    for block in twins[:2]:
        contents.discard(block)
    assert publication.take() == Change(b"", b"")
    contents.discard(twins[2])
    contents.add(twins[0], CONTENTS[1])
    contents.discard(twins[0])
    assert publication.take().added == b""
    assert publication.take() == Change(b"", b"")


def test_notes_and_calls_are_bounded_and_what_is_over_is_found_by_the_walk() -> None:
    contents = ContentMap()
    publication = Publication(CARD, lambda: contents)
    for number in range(MAX_NOTED + 5):
        contents.add(Block(number), blake2b(number.to_bytes(4), digest_size=16).digest())
    assert publication.take().n_blocks == MAX_BLOCKS
    assert publication.dropped_blocks == 5
    assert publication.hurried
    held = [publication.take().n_blocks for _ in range(MAX_NOTED // MAX_BLOCKS)]
    assert held == [MAX_BLOCKS] * (MAX_NOTED // MAX_BLOCKS - 1) + [0]

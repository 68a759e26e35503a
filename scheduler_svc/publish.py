"""What the prefix index is told of one engine's cache. No I/O, no clock.

Two ways lead there. What entered or left the cache is noted on the step path, by hash alone; what
is said of it is what holds when it is taken, so nothing needs an order. And a walk over all that
the cache holds, a 256th at a time, corrects whatever the index has wrong: slowly for ever, and in a
hurry once something may have been lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from pagemesh.scheduler_svc.block_lists import ContentMap
from pagemesh.shared.messages import ModelCard
from pagemesh.shared.prefix_index import KEY_BYTES, N_FIRST, first_bytes, index_keys

MAX_BLOCKS: Final = 256
"""Said in one call, a millisecond of Redis's time: lookups wait behind it."""


class Change(NamedTuple):
    """Packed keys of blocks that can be found in the engine's cache now, and that cannot."""

    added: bytes
    removed: bytes

    @property
    def n_blocks(self) -> int:
        return (len(self.added) + len(self.removed)) // KEY_BYTES


class Section(NamedTuple):
    """All keys held that begin with byte `first`, of those whose second byte is `second` or
    more."""

    first: int
    second: int
    held: bytes


class Publication:
    """`contents` gives the engine's map, which may be another each time."""

    def __init__(self, card: ModelCard, contents: Callable[[], ContentMap]) -> None:
        self._card = card
        self._contents = contents
        self._seen = contents()
        self._first_bytes = first_bytes(card)
        self._at = self._second = 0
        self._owed = 0
        self.dropped_blocks = 0
        """That the index was not told of when they changed."""

    @property
    def hurried(self) -> bool:
        """Whether the walk has to find what may have been lost."""
        return self._owed > 0

    def doubt(self) -> None:
        """The index may say anything of the engine: walk through everything."""
        self._owed = N_FIRST + 1 if self._second else N_FIRST

    def take(self) -> Change:
        """What changed since it was last taken, as far as one call goes."""
        contents = self._contents()
        self._look_for_losses(contents)
        added, removed = list[bytes](), list[bytes]()
        for content in contents.changes.take(MAX_BLOCKS):
            (added if contents.find(content) is not None else removed).append(content)
        return Change(*(index_keys(b"".join(each), self._card) for each in (added, removed)))

    def lost(self, change: Change) -> None:
        """Nobody knows whether the index was told of `change`."""
        self.dropped_blocks += change.n_blocks
        self.doubt()

    def section(self) -> Section:
        """The part of the cache that the walk is at."""
        contents = self._contents().beginning_with(self._at)
        held = index_keys(b"".join(contents), self._card)
        if self._second:
            keys = (held[i : i + KEY_BYTES] for i in range(0, len(held), KEY_BYTES))
            held = b"".join(key for key in keys if key[1] >= self._second)
        return Section(self._first_bytes[self._at], self._second, held)

    def walked(self, second: int) -> None:
        """The index is right of the section, up to `second`."""
        self._second = second % N_FIRST
        if self._second == 0:
            self._at = (self._at + 1) % N_FIRST
            self._owed = max(0, self._owed - 1)

    def _look_for_losses(self, contents: ContentMap) -> None:
        if contents is not self._seen:
            self._seen = contents
            self.doubt()
        if contents.changes.missed:
            self.dropped_blocks += contents.changes.missed
            contents.changes.missed = 0
            self.doubt()

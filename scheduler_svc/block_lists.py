"""What the block manager keeps its blocks in: the free list and the map from content to blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

MAX_NOTED: Final = 8192


class Block:
    """One page. `prev` and `next` link it into the free list, `older` and `newer` into the ring of
    blocks with the same content; each link leads to the block itself when it is in neither."""

    __slots__ = ("block_id", "hash", "newer", "next", "older", "prev", "refs")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.refs = 0
        self.hash: bytes | None = None
        self.prev = self.next = self
        self.older = self.newer = self


class FreeList:
    """An intrusive doubly linked list, least recently used first. No operation allocates."""

    def __init__(self) -> None:
        self._edge = Block(-1)
        self.count = 0

    def append(self, block: Block) -> None:
        self._insert(block, self._edge.prev, self._edge)

    def push_front(self, block: Block) -> None:
        self._insert(block, self._edge, self._edge.next)

    def remove(self, block: Block) -> None:
        block.prev.next = block.next
        block.next.prev = block.prev
        block.prev = block.next = block
        self.count -= 1

    def pop_front(self, n: int) -> list[Block]:
        """The first `n` blocks; there are as many."""
        popped: list[Block] = []
        first = self._edge.next
        for _ in range(n):
            popped.append(first)
            first = first.next
        for block in popped:
            block.prev = block.next = block
        self._edge.next, first.prev = first, self._edge
        self.count -= n
        return popped

    def walk(self, limit: int) -> Iterator[Block]:
        """The blocks in order; at most `limit` of them, so that a damaged list ends too."""
        block = self._edge.next
        while block is not self._edge and limit > 0:
            yield block
            block = block.next
            limit -= 1

    def _insert(self, block: Block, before: Block, after: Block) -> None:
        block.prev, block.next = before, after
        before.next = after.prev = block
        self.count += 1


class Changes:
    """Contents that entered or left a map since they were last taken, each once however often.
    Beyond MAX_NOTED they are only counted, as missed."""

    __slots__ = ("_noted", "missed")

    def __init__(self) -> None:
        self._noted: set[bytes] = set()
        self.missed = 0

    def __len__(self) -> int:
        return len(self._noted)

    def note(self, content: bytes) -> None:
        if len(self._noted) < MAX_NOTED:
            self._noted.add(content)
        elif content not in self._noted:
            self.missed += 1

    def take(self, limit: int) -> list[bytes]:
        """Some of them, at most `limit`; the others stay."""
        if len(self._noted) <= limit:
            taken, self._noted = list(self._noted), set()
            return taken
        return [self._noted.pop() for _ in range(limit)]


class ContentMap:
    """Hash → blocks holding that content, the newest in front. Usually there is one; twins form a
    ring through the blocks themselves, so an entry costs no container.

    A dict is copied whenever its insertions have used it up, however many entries were deleted: of
    a large pool that would hold up a step by milliseconds. So there are many small ones.
    """

    def __init__(self) -> None:
        self._shards: list[dict[bytes, Block]] = [{} for _ in range(256)]
        self.changes = Changes()

    def find(self, content: bytes) -> Block | None:
        return self._shards[content[0]].get(content)

    def beginning_with(self, first: int) -> Iterable[bytes]:
        """The contents whose first byte is `first`."""
        return self._shards[first].keys()

    def add(self, block: Block, content: bytes) -> None:
        block.hash = content
        shard = self._shards[content[0]]
        newest = shard.get(content)
        if newest is None:
            self.changes.note(content)
        else:
            block.older, block.newer = newest, newest.newer
            block.newer.older = newest.newer = block
        shard[content] = block

    def discard(self, block: Block) -> None:
        """Forget what `block` holds. Silent when that is nothing."""
        if block.hash is None:
            return
        shard = self._shards[block.hash[0]]
        if shard.get(block.hash) is block:
            if block.older is block:
                del shard[block.hash]
                self.changes.note(block.hash)
            else:
                shard[block.hash] = block.older
        block.older.newer, block.newer.older = block.newer, block.older
        block.older = block.newer = block
        block.hash = None

    def holds(self, block: Block) -> bool:
        """Whether a walk from the map reaches `block`."""
        if block.hash is None:
            return False
        first = twin = self.find(block.hash)
        while twin is not None and twin is not block:
            twin = None if twin.older is first else twin.older
        return twin is not None

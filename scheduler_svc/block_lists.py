"""What the block manager keeps its blocks in: the free list and the map from content to blocks."""

from __future__ import annotations

from collections.abc import Iterator


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


class ContentMap:
    """Hash → blocks holding that content, the newest in front. Usually there is one; twins form a
    ring through the blocks themselves, so an entry costs no container.

    A dict is copied whenever its insertions have used it up, however many entries were deleted: of
    a large pool that would hold up a step by milliseconds. So there are many small ones.
    """

    def __init__(self) -> None:
        self._shards: list[dict[bytes, Block]] = [{} for _ in range(256)]

    def find(self, content: bytes) -> Block | None:
        return self._shards[content[0]].get(content)

    def add(self, block: Block, content: bytes) -> None:
        block.hash = content
        shard = self._shards[content[0]]
        newest = shard.get(content)
        if newest is not None:
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

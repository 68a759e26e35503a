"""KV blocks as virtual memory: reference counts, an LRU free list, a map from content to blocks.

A cached block nobody holds stays on the free list and stays findable: "free" and "evictable" are
one thing. Blocks are released tail first, so heads outlive tails and what the cache holds of a
chain stays prefix-closed. Identical blocks may coexist: block tables are append-only.
Decisions are pure (`match`, `plan`) and committed apart (`commit`, `take`, `release`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from math import ceil
from typing import Final, NamedTuple

from pagemesh.scheduler_svc.block_lists import Block, ContentMap, FreeList
from pagemesh.scheduler_svc.errors import InvariantError

NULL_BLOCK: Final = 0
"""Absorbs the writes of padding; never handed out."""


def blocks_for(n_tokens: int, block_tokens: int) -> int:
    """Blocks that `n_tokens` tokens occupy."""
    return ceil(n_tokens / block_tokens)


class Allocation(NamedTuple):
    """A request's blocks as planned: `hit` blocks shared with others or the cache, then `n_fresh`
    new ones. `n_free` free blocks are consumed in all: cached hits leave the free list too."""

    hit: list[int]
    n_fresh: int
    n_free: int


class BlockManager:
    """Owner of every block id of one worker's KV pool. Block 0 is the null block."""

    def __init__(self, num_blocks: int) -> None:
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free = FreeList()
        self._contents = ContentMap()
        for block in self._blocks[1:]:
            self._free.append(block)

    @property
    def contents(self) -> ContentMap:
        """What can be found. A repair replaces it."""
        return self._contents

    @property
    def total(self) -> int:
        """Blocks that can hold tokens: all but the null block."""
        return len(self._blocks) - 1

    @property
    def free(self) -> int:
        """Blocks nobody holds, cached ones included."""
        return self._free.count

    def refs(self, block_id: int) -> int:
        return self._blocks[block_id].refs

    def holds(self, block_id: int, content: bytes) -> bool:
        """Whether the block is published as `content` and was not reused since."""
        return self._blocks[block_id].hash == content

    # -- plan: pure ------------------------------------------------------------------------------

    def match(self, hashes: Sequence[bytes], limit_blocks: int) -> list[int]:
        """The cached blocks of the longest known prefix of `hashes`, at most `limit_blocks`."""
        hit: list[int] = []
        for content in hashes[:limit_blocks]:
            block = self._contents.find(content)
            if block is None:
                break
            hit.append(block.block_id)
        return hit

    def plan(
        self, n_blocks: int, hit: Sequence[int] = (), touched: Collection[int] = ()
    ) -> Allocation:
        """`n_blocks` blocks of which `hit` exist. `touched`: blocks that other plans of the same
        commit take off the free list already."""
        n_fresh = n_blocks - len(hit)
        cold = sum(1 for i in hit if self._blocks[i].refs == 0 and i not in touched)
        return Allocation(list(hit), n_fresh, n_fresh + cold)

    def gain(self, holders: Iterable[Sequence[int]]) -> int:
        """How many blocks become free when all `holders` release theirs."""
        drops = Counter(block_id for block_ids in holders for block_id in block_ids)
        return sum(1 for block_id, n in drops.items() if self._blocks[block_id].refs == n)

    # -- commit ----------------------------------------------------------------------------------

    def commit(self, plans: Sequence[Allocation]) -> list[list[int]]:
        """The block tables of `plans`. Every hit is taken before any fresh block is popped, or a
        hit could be evicted by the very step that relies on it."""
        for plan in plans:
            self._touch(plan.hit)
        return [plan.hit + self.take(plan.n_fresh) for plan in plans]

    def take(self, n: int) -> list[int]:
        """`n` fresh blocks, least recently used first. Raises InvariantError, and takes none,
        when fewer are free: whoever planned must have known."""
        if n > self._free.count:
            raise InvariantError(f"{n} blocks were planned but {self._free.count} are free")
        fresh = self._free.pop_front(n)
        for block in fresh:
            if block.hash is not None:
                self._contents.discard(block)
            block.refs = 1
        return [block.block_id for block in fresh]

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each. Tails go first; what holds no content is reused first."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            block.refs -= 1
            if block.refs == 0 and block.hash is None:
                self._free.push_front(block)
            elif block.refs == 0:
                self._free.append(block)
            elif block.refs < 0:
                block.refs = 0
                raise InvariantError(f"block {block_id} was released more often than taken")

    def publish(self, block_id: int, content: bytes) -> bool:
        """Make a full, confirmed block findable. False when it already was."""
        block = self._blocks[block_id]
        if block.hash == content:
            return False
        if block.hash is not None:
            raise InvariantError(f"block {block_id} is published as other content")
        self._contents.add(block, content)
        return True

    def forget(self, block_ids: Iterable[int]) -> None:
        """Take blocks out of the cache: what they hold cannot be trusted."""
        for block_id in block_ids:
            self._contents.discard(self._blocks[block_id])

    def forget_free(self) -> int:
        """As `forget`, every block nobody holds. Returns how many held something."""
        cached = [block for block in self._free.walk(self.total) if block.hash is not None]
        for block in cached:
            self._contents.discard(block)
        return len(cached)

    def adopt(self, contents: Iterable[tuple[int, bytes]]) -> None:
        """Of a pool in which nobody holds a block: what blocks already hold, least recently used
        first. The others are reused before them."""
        for block_id, content in contents:
            block = self._blocks[block_id]
            self._free.remove(block)
            self._free.append(block)
            self._contents.add(block, content)

    def _touch(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.refs == 0:
                self._free.remove(block)
            block.refs += 1

    # -- audit -----------------------------------------------------------------------------------

    def audit(self, held: Iterable[Sequence[int]]) -> list[str]:
        """Prove free + used = total against the block tables `held`; repair and say what was wrong.

        Empty when the books are sound.
        """
        expected = Counter(block_id for block_ids in held for block_id in block_ids)
        findings = [
            *self._audit_refs(expected),
            *self._audit_free_list(expected),
            *self._audit_contents(),
        ]
        if findings:
            self._rebuild(expected)
        return findings

    def _audit_refs(self, expected: Counter[int]) -> Iterator[str]:
        if expected[NULL_BLOCK]:
            yield "the null block is held by a request"
        for block in self._blocks[1:]:
            if block.refs != expected[block.block_id]:
                want = expected[block.block_id]
                yield f"block {block.block_id} counts {block.refs} holders but has {want}"

    def _audit_free_list(self, expected: Counter[int]) -> Iterator[str]:
        walked = [block.block_id for block in self._free.walk(self.total + 1)]
        listed = set(walked)
        used = {block_id for block_id, n in expected.items() if n}
        if len(walked) != len(listed) or len(walked) != self._free.count:
            yield f"the free list counts {self._free.count} blocks but holds {len(walked)}"
        if both := listed & used:
            yield f"blocks both free and held: {sorted(both)[:8]}"
        if lost := self.total - len(listed | used):
            yield f"{lost} blocks are neither free nor held"

    def _audit_contents(self) -> Iterator[str]:
        for block in self._blocks:
            if block.hash is not None and not self._contents.holds(block):
                yield f"block {block.block_id} is published but cannot be found"

    def _rebuild(self, expected: Counter[int]) -> None:
        """Free list, reference counts and map anew from the block tables; the cache survives."""
        self._free, self._contents = FreeList(), ContentMap()
        for block in self._blocks[1:]:
            block.refs = expected[block.block_id]
            block.prev = block.next = block.older = block.newer = block
            if block.hash is not None:
                self._contents.add(block, block.hash)
            if block.refs == 0:
                self._free.append(block)

"""The block manager against a model that knows what every block holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagemesh.scheduler_svc.blocks import NULL_BLOCK, BlockManager
from pagemesh.shared.hashing import chain_hashes
from pagemesh.shared.wire import pack_ids

CHAIN_BLOCKS = 5


def chain(seed: int, branch: int) -> list[bytes]:
    """Hashes of a chain of blocks. Chains of one seed agree up to block `branch`."""
    tokens = [seed if i < branch else 10 + branch for i in range(CHAIN_BLOCKS)]
    return chain_hashes(pack_ids(tokens), 1)


@dataclass
class Table:
    """A request's blocks; block i will hold, once published, the content `hashes[i]`."""

    hashes: list[bytes]
    blocks: list[int]
    published: int
    shared: int = field(default=0)


class BlockMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(2, 14))
    def start(self, num_blocks: int) -> None:
        self.manager = BlockManager(num_blocks)
        self.tables: list[Table] = []
        self.contents: dict[int, bytes] = {}
        self.forgot = False

    def chains(self) -> list[list[bytes]]:
        return [chain(seed, branch) for seed in (1, 2) for branch in range(CHAIN_BLOCKS + 1)]

    # -- requests come and go ----------------------------------------------------------------------

    @rule(
        wishes=st.lists(
            st.tuples(
                st.integers(1, 2), st.integers(0, CHAIN_BLOCKS), st.integers(1, CHAIN_BLOCKS)
            ),
            min_size=1,
            max_size=3,
        )
    )
    def admit(self, wishes: list[tuple[int, int, int]]) -> None:
        """Several requests enter in one commit, as in one step."""
        plans, tables, touched, free = [], [], set(), self.manager.free
        for seed, branch, n_blocks in wishes:
            hashes = chain(seed, branch)
            hit = self.manager.match(hashes, n_blocks - 1)
            assert [self.contents[block] for block in hit] == hashes[: len(hit)]
            plan = self.manager.plan(n_blocks, hit, touched)
            if plan.n_free > free:
                continue
            free -= plan.n_free
            touched.update(hit)
            plans.append(plan)
            tables.append((hashes, len(hit)))
        for (hashes, n_hit), blocks in zip(tables, self.manager.commit(plans), strict=True):
            assert [self.contents.get(block) for block in blocks[:n_hit]] == hashes[:n_hit]
            self.take_over(blocks[n_hit:])
            self.tables.append(Table(hashes, blocks, n_hit))
        assert self.manager.free == free

    def take_over(self, fresh: list[int]) -> None:
        held = {block for table in self.tables for block in table.blocks}
        assert not held & set(fresh)
        assert NULL_BLOCK not in fresh
        for block in fresh:
            self.contents.pop(block, None)

    @precondition(lambda self: self.tables)
    @rule(pick=st.integers(0))
    def grow(self, pick: int) -> None:
        table = self.tables[pick % len(self.tables)]
        if len(table.blocks) < CHAIN_BLOCKS and self.manager.free:
            fresh = self.manager.take(1)
            self.take_over(fresh)
            table.blocks += fresh

    @precondition(lambda self: self.tables)
    @rule(pick=st.integers(0), upto=st.integers(0, CHAIN_BLOCKS))
    def publish(self, pick: int, upto: int) -> None:
        table = self.tables[pick % len(self.tables)]
        for i in range(table.published, min(upto, len(table.blocks))):
            block = table.blocks[i]
            assert self.manager.publish(block, table.hashes[i]) == (block not in self.contents)
            assert not self.manager.publish(block, table.hashes[i])
            self.contents[block] = table.hashes[i]
            table.published = i + 1

    @precondition(lambda self: self.tables)
    @rule(pick=st.integers(0), n=st.integers(1, 3))
    def release(self, pick: int, n: int) -> None:
        """Several requests leave at once; what they share comes free only with the last."""
        first = pick % len(self.tables)
        leaving = self.tables[first : first + n]
        del self.tables[first : first + n]
        gain = self.manager.gain([table.blocks for table in leaving])
        before = self.manager.free
        for table in leaving:
            self.manager.release(table.blocks)
        assert self.manager.free == before + gain

    @precondition(lambda self: self.tables)
    @rule(pick=st.integers(0))
    def fork(self, pick: int) -> None:
        """Another request shares all but the last block, and gets one of its own."""
        table = self.tables[pick % len(self.tables)]
        shared = table.blocks[:-1]
        plan = self.manager.plan(len(table.blocks), shared)
        assert plan.n_free == 1
        if self.manager.free:
            [blocks] = self.manager.commit([plan])
            self.take_over(blocks[-1:])
            published = min(table.published, len(shared))
            self.tables.append(Table(table.hashes, blocks, published))

    @precondition(lambda self: self.tables)
    @rule(pick=st.integers(0))
    def forget(self, pick: int) -> None:
        """A request went wrong: nobody may find its blocks any more."""
        self.forgot = True
        table = self.tables[pick % len(self.tables)]
        self.manager.forget(table.blocks)
        for block in table.blocks:
            self.contents.pop(block, None)
        assert not set(self.findable()) & set(table.blocks)
        for other in self.tables:
            other.published = max(
                (i + 1 for i, block in enumerate(other.blocks) if block in self.contents),
                default=0 if other is not table else CHAIN_BLOCKS,
            )

    @rule()
    def forget_free(self) -> None:
        """What nobody holds is cached no more; what somebody holds can be found as before."""
        held = {block for table in self.tables for block in table.blocks}
        cached = [block for block in self.contents if block not in held]
        assert self.manager.forget_free() == len(cached)
        for block in cached:
            del self.contents[block]

    @rule(block=st.integers(1, 13), what=st.sampled_from(["leak", "double", "unlist"]))
    def damage_and_repair(self, block: int, what: str) -> None:
        """Whatever happens to the books, the audit says so and they are sound again."""
        block = 1 + block % self.manager.total
        damaged = self.manager._blocks[block]
        if what == "leak":
            damaged.refs += 1
        elif what == "double":
            damaged.refs = -1
        elif damaged.refs == 0:
            self.manager._free.remove(damaged)
        else:
            return
        held = [table.blocks for table in self.tables]
        assert self.manager.audit(held)
        assert self.manager.audit(held) == []
        self.forgot = True  # the repaired free list has lost its order

    # -- the books ---------------------------------------------------------------------------------

    def findable(self) -> list[int]:
        chains = self.chains()
        return [b for hashes in chains for b in self.manager.match(hashes, CHAIN_BLOCKS)]

    @invariant()
    def free_and_used_add_up(self) -> None:
        held = {block for table in self.tables for block in table.blocks}
        assert self.manager.free + len(held) == self.manager.total
        assert self.manager.audit([table.blocks for table in self.tables]) == []

    @invariant()
    def what_is_found_is_what_was_published(self) -> None:
        for hashes in self.chains():
            hit = self.manager.match(hashes, CHAIN_BLOCKS)
            assert [self.contents[block] for block in hit] == hashes[: len(hit)]

    @invariant()
    def cached_is_prefix_closed(self) -> None:
        """Tails go before heads, so no cached block is cut off from its chain."""
        if self.forgot:
            return
        reachable = {h for hashes in self.chains() for h in self.hit_hashes(hashes)}
        assert reachable == set(self.contents.values())
        assert {c for shard in self.manager._contents._shards for c in shard} == reachable

    def hit_hashes(self, hashes: list[bytes]) -> list[bytes]:
        return hashes[: len(self.manager.match(hashes, CHAIN_BLOCKS))]


BlockMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestBlockMachine = BlockMachine.TestCase

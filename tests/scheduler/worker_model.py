"""A worker that computes nothing and forgives nothing.

It keeps what a real one keeps (rows by slot, pages of KV) and holds the scheduler to the contract
of `Step`. A page remembers, for each position, a digest of the whole context it was computed from,
and the sampled token is a function of that digest: any wrong page, position or order shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pagemesh.scheduler_svc.results import BlockContent
from pagemesh.scheduler_svc.takeover import trusted_contents
from pagemesh.shared.engine_messages import (
    CachedBlocks,
    LogprobRow,
    NeedSnapshot,
    NewRow,
    Pooled,
    PromptLogprobs,
    Step,
    StepResult,
)
from pagemesh.shared.hashing import chain_hashes, split_hashes
from pagemesh.shared.messages import Capacity, EngineStats, EngineStatus, ModelCard
from pagemesh.shared.pooling import PoolingParams
from pagemesh.shared.wire import pack_ids, unpack_ids
from pagemesh.worker_svc.pages import PageContents

EOS = 2
VOCAB = 29
EPOCH = 7
GARBAGE = -1
"""What a row that went wrong leaves in its pages, and so does every row that attends to them."""
SALTS = ("", "pepper")


def digests_of(ids: Sequence[int]) -> list[int]:
    """Digest of the context up to and including each position."""
    digests = []
    digest = 0
    for token in ids:
        digest = hash((digest, token))
        digests.append(digest)
    return digests


def next_token(digest: int) -> int:
    return digest % VOCAB


def pairs(packed: bytes) -> list[tuple[int, int]]:
    flat = unpack_ids(packed)
    return list(zip(flat[::2], flat[1::2], strict=True))


class ContractViolation(AssertionError):
    """The scheduler broke the contract of Step."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ContractViolation(message)


@dataclass
class Row:
    ids: list[int]
    n_prompt: int
    wants_prompt_logprobs: bool
    wants_logprobs: bool
    blocks: list[int]
    computed: int
    pooling: PoolingParams | None = None
    summed: list[int] = field(default_factory=list)
    """The ids whose states were added up for the mean."""
    tainted: bool = False
    digests: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.digests = digests_of(self.ids)

    def vector(self) -> bytes:
        """What is pooled, by the ids that went into it. A tainted one would show."""
        assert self.pooling is not None
        ids = self.summed if self.pooling.reads_all else self.ids[-1:]
        return pack_ids([*ids, *[GARBAGE] * self.tainted])

    def append(self, token: int) -> None:
        self.ids.append(token)
        self.digests.append(hash((self.digests[-1], token)))


class WorkerModel:
    def __init__(self, card: ModelCard, capacity: Capacity) -> None:
        self.card = card
        self.block_tokens = card.block_tokens
        self.capacity = capacity
        self.pages: list[list[int | None]] = [
            [None] * card.block_tokens for _ in range(capacity.num_blocks)
        ]
        self.rows: dict[int, Row] = {}
        self.decoding: list[int] = []
        self.batches: dict[int, list[tuple[int, int]]] = {}
        """(slot, tokens) of each row, by step."""
        self.contents = PageContents(capacity.num_blocks)
        """The real one: what is told of a page is checked against the page."""
        self.last_step = 0
        self.in_step = False
        self.steps = 0
        self._prefixes: dict[int, list[int]] = {}

    def execute(
        self, step: Step, *, nonfinite: Sequence[int] = (), failed: Sequence[int] = ()
    ) -> StepResult | NeedSnapshot:
        """`nonfinite`, `failed`: rows that go wrong (taken modulo the number of rows)."""
        if step.base == 0:
            self._forget()
            self.in_step = True
        elif not self.in_step or step.base != self.last_step:
            return self.notice_gap()
        self.last_step = step.step
        self.steps += 1
        self._apply(step)
        batch = self._batch(step)
        self.batches[step.step] = batch
        slots, n_tokens = [slot for slot, _ in batch], [n for _, n in batch]
        self._check_batch(slots, n_tokens)
        n = len(slots)
        result = self._compute(
            step, slots, n_tokens, {i % n for i in nonfinite if n}, {i % n for i in failed if n}
        )
        if result.nonfinite or result.failed:
            self.contents.distrust(step.step)
        sealed = unpack_ids(step.sealed)
        for block, content in zip(sealed, split_hashes(step.sealed_hashes), strict=True):
            self._check_sealed(block, content)
        return result

    def told(self) -> list[CachedBlocks]:
        """What the pages hold, for a scheduler that takes over. It is true."""
        self._forget()
        told = self.contents.told(EPOCH, self.card)
        for held in told:
            blocks = unpack_ids(held.blocks)
            for block, content in zip(blocks, split_hashes(held.hashes), strict=True):
                self._check_sealed(block, content)
        return told

    def change_hands(self) -> list[BlockContent]:
        """The same, as the scheduler will have it."""
        status = EngineStatus("engine", self.card, self.capacity, EngineStats())
        return trusted_contents(self.told(), EPOCH, status)

    def _forget(self) -> None:
        for row in self.rows.values():
            self.contents.release(np.array(row.blocks, np.int32))
        self.rows, self.decoding = {}, []
        self.in_step = False

    def notice_gap(self) -> NeedSnapshot:
        self._forget()
        return NeedSnapshot(EPOCH, self.last_step)

    # -- the diff ----------------------------------------------------------------------------------

    def _apply(self, step: Step) -> None:
        require(step.epoch == EPOCH, "wrong epoch")
        left = []
        for slot in unpack_ids(step.gone):
            require(slot in self.rows, f"slot {slot} is gone but was empty")
            left.append(np.array(self.rows.pop(slot).blocks, np.int32))
        self.contents.follow(step, left, self.block_tokens)
        for new in step.new:
            self._enter(new)
        for slot, block in pairs(step.grown):
            require(slot in self.rows, f"a block for the empty slot {slot}")
            self.rows[slot].blocks.append(block)
        for src, dst in pairs(step.copies):
            require(self._holders(dst) == 1, f"copy into block {dst}, which is shared or free")
            self.pages[dst] = list(self.pages[src])
        for row in self.rows.values():
            self._check_table(row)

    def _enter(self, new: NewRow) -> None:
        require(new.slot not in self.rows, f"slot {new.slot} is taken")
        require(0 <= new.slot < self.capacity.max_num_seqs, f"no slot {new.slot}")
        ids = unpack_ids(new.ids)
        require(0 <= new.computed < len(ids), "nothing is left to compute")
        sums = new.pooling is not None and new.pooling.reads_all
        require(not sums or new.computed == 0, "some of what is to be added up is left out")
        self.rows[new.slot] = Row(
            ids,
            new.n_prompt,
            new.params.prompt_logprobs is not None,
            new.params.logprobs is not None,
            unpack_ids(new.blocks),
            new.computed,
            new.pooling,
        )

    def _check_table(self, row: Row) -> None:
        require(len(set(row.blocks)) == len(row.blocks), "a block stands twice in a table")
        require(all(0 < b < self.capacity.num_blocks for b in row.blocks), "block out of range")

    def _check_sealed(self, block: int, content: bytes) -> None:
        page = self.pages[block]
        require(None not in page, f"block {block} is sealed but not full")
        prefix = self._prefixes[page[-1]]  # type: ignore[index]
        require(page == digests_of(prefix)[-self.block_tokens :], f"block {block} holds a mix")
        packed = pack_ids(prefix)
        chains = [chain_hashes(packed, self.block_tokens, salt=salt)[-1] for salt in SALTS]
        require(content in chains, f"block {block} is sealed with another content's hash")

    # -- the batch ---------------------------------------------------------------------------------

    def _batch(self, step: Step) -> list[tuple[int, int]]:
        for slot in unpack_ids(step.gone):
            if slot in self.decoding:
                self.decoding.remove(slot)
        for slot in unpack_ids(step.paused):
            require(slot in self.decoding, f"slot {slot} pauses but did not decode")
            self.decoding.remove(slot)
        for slot in unpack_ids(step.joined):
            require(slot not in self.decoding, f"slot {slot} joins but decodes already")
            self.decoding.append(slot)
        batch = [*((slot, 1) for slot in self.decoding), *pairs(step.chunks)]
        require(len(batch) == step.n_rows, "the rows are not as many as the step says")
        require(sum(n for _, n in batch) == step.n_tokens, "nor are the tokens")
        return batch

    def _check_batch(self, slots: list[int], n_tokens: list[int]) -> None:
        require(len(slots) == len(n_tokens), "slots and tokens differ in number")
        require(len(set(slots)) == len(slots), "a slot stands twice in a step")
        require(sum(n_tokens) <= self.capacity.max_num_batched_tokens, "the budget is exceeded")
        require(len(self.rows) <= self.capacity.max_num_seqs, "too many rows")
        multi_seen = False
        for slot, n in zip(slots, n_tokens, strict=True):
            require(slot in self.rows, f"slot {slot} is empty")
            row = self.rows[slot]
            require(n >= 1, "a row computes nothing")
            require(row.computed + n <= len(row.ids), "computing tokens nobody knows")
            require(row.computed + n <= len(row.blocks) * self.block_tokens, "no page to write to")
            require(n > 1 or not multi_seen, "a decode stands behind a prefill")
            multi_seen = n > 1

    def _compute(
        self,
        step: Step,
        slots: list[int],
        n_tokens: list[int],
        nonfinite: set[int],
        failed: set[int],
    ) -> StepResult:
        for slot in slots:
            self._check_context(self.rows[slot])
        sampled, logprobs, prompt_logprobs, pooled = [], [], [], []
        for i, (slot, n) in enumerate(zip(slots, n_tokens, strict=True)):
            row = self.rows[slot]
            start = row.computed
            row.tainted = row.tainted or i in failed or i in nonfinite
            self._write(row, n)
            row.summed += row.ids[start : start + n]
            token = -1
            if row.computed == len(row.ids):
                if row.pooling is not None:
                    pooled.append(Pooled(i, row.vector()))
                # A tainted row's token is wrong, so passing it on to a client would show.
                token = (next_token(row.digests[-1]) + row.tainted) % VOCAB
                row.append(token)
                if row.wants_logprobs:
                    logprobs.append(LogprobRow(i, pack_ids([token]), bytes(4), 1))
            if row.wants_prompt_logprobs:
                prompt_logprobs += self._prompt_rows(i, row, start, n)
            sampled.append(-1 if i in failed else token)
        return StepResult(
            step.epoch,
            step.step,
            pack_ids(sampled),
            nonfinite=sorted(nonfinite - failed),
            failed=[(i, "injected") for i in sorted(failed)],
            logprobs=[row for row in logprobs if row.key not in failed],
            prompt_logprobs=[rows for rows in prompt_logprobs if rows.key not in failed],
            pooled=[row for row in pooled if row.key not in failed],
        )

    def _check_context(self, row: Row) -> None:
        """What the row attends to is what its ids say, and was written before this step."""
        for position in range(row.computed):
            block, offset = divmod(position, self.block_tokens)
            content = self.pages[row.blocks[block]][offset]
            require(content is not None, f"position {position} was never written")
            if content == GARBAGE:
                row.tainted = True
                return
            require(content == row.digests[position], f"position {position} holds another context")

    def _write(self, row: Row, n: int) -> None:
        for position in range(row.computed, row.computed + n):
            block, offset = divmod(position, self.block_tokens)
            page = row.blocks[block]
            require(self._holders(page) == 1, f"writing into block {page}, which is shared")
            digest = row.digests[position]
            self._prefixes[digest] = row.ids[: position + 1]
            self.pages[page][offset] = GARBAGE if row.tainted else digest
        row.computed += n

    def _holders(self, block: int) -> int:
        return Counter(b for row in self.rows.values() for b in row.blocks)[block]

    def _prompt_rows(self, i: int, row: Row, start: int, n: int) -> list[PromptLogprobs]:
        """Positions start+1 … of the prompt; a row's value is its token id."""
        positions = range(start + 1, min(start + n + 1, row.n_prompt))
        if not positions:
            return []
        ids = pack_ids(row.ids[p] for p in positions)
        ranks = pack_ids(positions)
        return [PromptLogprobs(i, positions[0], 1, ids, bytes(len(ids)), ranks)]

"""Schedulers that come and go over a worker whose pages stay."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from scheduler_helpers import (
    Driver,
    Seen,
    expected_answer,
    make_capacity,
    make_card,
    make_submit,
)
from worker_model import EPOCH

from pagemesh.scheduler_svc.blocks import BlockManager
from pagemesh.scheduler_svc.takeover import trusted_contents
from pagemesh.shared.engine_messages import CachedBlocks
from pagemesh.shared.hashing import HASH_BYTES, chain_hashes, split_hashes
from pagemesh.shared.messages import EngineStats, EngineStatus
from pagemesh.shared.wire import pack_ids
from pagemesh.worker_svc import pages

PROMPT = list(range(3, 27))
"""Six blocks of four tokens."""
OTHER = PROMPT[::-1]


def served(driver: Driver, key: int, prompt: list[int], **fields: int) -> Seen:
    seen = driver.submit(make_submit(key, prompt, **fields))
    driver.run()
    return seen


def taken_over(driver: Driver, **more: bool) -> Driver:
    """A new scheduler on the same worker; results that the old one awaits go to nobody."""
    return Driver(card=driver.card, capacity=driver.capacity, worker=driver.worker, **more)


def test_a_resumed_request_finds_its_own_blocks() -> None:
    first = Driver(run_ahead_depth=2)
    seen = first.submit(make_submit(1, PROMPT, max_tokens=20))
    for _ in range(14):
        first.step()
    first.plan()  # its result is lost with the scheduler
    second = taken_over(first)
    resumed = second.submit(make_submit(1, PROMPT, prior=seen.ids, max_tokens=20))
    step = second.plan()
    assert step is not None
    # Of 24 prompt tokens and 14 generated ones, nine blocks are full. What the last result filled
    # was published, and told with the step whose result is lost.
    assert step.n_tokens == 38 - 9 * 4
    second.run()
    undisturbed = served(Driver(), 1, PROMPT, max_tokens=20)
    assert seen.ids + resumed.ids == undisturbed.ids


def test_another_request_finds_what_others_left() -> None:
    first = Driver()
    served(first, 1, PROMPT)
    second = taken_over(first)
    assert served(second, 2, PROMPT).started == [20]
    assert served(taken_over(second), 3, PROMPT).started == [20]


def test_blocks_least_recently_used_are_reused_first() -> None:
    """Six blocks each, of a pool of fourteen: both prompts fit beside one more block."""
    first = Driver(capacity=make_capacity(num_blocks=15))
    for key, prompt in enumerate((OTHER, PROMPT, OTHER)):
        served(first, key, prompt, max_tokens=1)
    second = taken_over(first)
    served(second, 3, [3] * 16, max_tokens=1)  # two blocks nobody used, then two of PROMPT's tail
    assert served(second, 4, OTHER, max_tokens=1).started == [20]
    assert served(taken_over(first), 5, PROMPT, max_tokens=1).started[0] < 20


def test_a_block_without_those_before_it_is_found_once_they_are_back() -> None:
    first = Driver()
    served(first, 1, PROMPT)
    head = chain_hashes(pack_ids(PROMPT), 4)[0]
    orphans = [pair for pair in first.worker.change_hands() if pair[1] != head]
    blocks = BlockManager(first.capacity.num_blocks)
    blocks.adopt(orphans)
    hashes = chain_hashes(pack_ids(PROMPT), 4)
    assert blocks.match(hashes, 6) == []
    [again] = blocks.take(1)
    blocks.publish(again, head)
    assert len(blocks.match(hashes, 6)) == 6
    assert blocks.audit([[again]]) == []


def test_without_a_prefix_cache_nothing_is_taken_over() -> None:
    first = Driver()
    served(first, 1, PROMPT)
    assert served(taken_over(first, prefix_caching=False), 2, PROMPT).started == [0]


def test_what_a_pool_holds_is_told_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Driver()
    served(first, 1, PROMPT, max_tokens=1)
    monkeypatch.setattr(pages, "MAX_BLOCKS_A_FRAME", 4)
    told = first.worker.told()
    assert [len(held.blocks) // 4 for held in told] == [4, 2]
    hashes = b"".join(held.hashes for held in told)
    # The tail was released first.
    assert split_hashes(hashes) == chain_hashes(pack_ids(PROMPT), 4)[::-1]


HASH = bytes(range(HASH_BYTES))
GOOD = CachedBlocks(EPOCH, "tiny", 4, pack_ids([3]), HASH)


@pytest.mark.parametrize(
    "odd",
    [
        GOOD._replace(epoch=EPOCH + 1),
        GOOD._replace(fingerprint="another"),
        GOOD._replace(block_tokens=8),
        GOOD._replace(blocks=pack_ids([0])),
        GOOD._replace(blocks=pack_ids([-1])),
        GOOD._replace(blocks=pack_ids([65])),
        GOOD._replace(blocks=pack_ids([5, 6])),
        GOOD._replace(blocks=pack_ids([5, 5]), hashes=HASH * 2),
        GOOD._replace(blocks=b"123"),
        GOOD,
    ],
    ids=str,
)
def test_what_does_not_fit_the_worker_is_not_trusted(odd: CachedBlocks) -> None:
    offered = EngineStatus("engine", make_card(), make_capacity(num_blocks=65), EngineStats())
    other = GOOD._replace(blocks=pack_ids([4]))
    assert trusted_contents([GOOD, other], EPOCH, offered) == [(3, HASH), (4, HASH)]
    told = [GOOD._replace(blocks=pack_ids([5])), odd] if odd is not GOOD else [GOOD, GOOD]
    assert trusted_contents(told, EPOCH, offered) == []


class TakeoverMachine(RuleBasedStateMachine):
    """A small pool, few prompts, and schedulers that do not live long. `WorkerModel.told` holds
    every hash that is told against the context that its page was computed from, and each answer is
    checked as in any other test."""

    @initialize(num_blocks=st.integers(7, 12), depth=st.integers(1, 3))
    def start(self, num_blocks: int, depth: int) -> None:
        self.keys = 0
        self.depth = depth
        self.live: dict[int, tuple[list[int], Seen]] = {}
        card = make_card(max_model_len=12, block_tokens=2)
        capacity = make_capacity(num_blocks=num_blocks, max_num_seqs=3, budget=8)
        self.driver = Driver(card=card, capacity=capacity, run_ahead_depth=depth)

    @rule(prompt=st.lists(st.sampled_from([3, 4]), min_size=4, max_size=8))
    def submit(self, prompt: list[int]) -> None:
        self._enter(prompt, [])

    @rule(n=st.integers(1, 8))
    def advance(self, n: int) -> None:
        for _ in range(n):
            self.driver.plan()
            self.driver.plan()
            self.driver.land()
        self._check()

    @rule(row=st.integers(0, 2), depth=st.integers(0, 3))
    def fail_a_row(self, row: int, depth: int) -> None:
        """It lands after `depth` more steps have been sent."""
        self.driver.plan(nonfinite=[row])
        for _ in range(depth):
            self.driver.plan()

    @rule()
    def take_over(self) -> None:
        self._check()
        running, self.live = self.live, {}
        self.driver = Driver(
            card=self.driver.card,
            capacity=self.driver.capacity,
            worker=self.driver.worker,
            run_ahead_depth=self.depth,
        )
        for prompt, seen in running.values():
            self._enter(prompt, seen.ids)

    def _enter(self, prompt: list[int], prior: list[int]) -> None:
        self.keys += 1
        more = make_submit(self.keys, prompt, prior=prior, max_tokens=4)
        seen = self.driver.submit(more)
        seen.ids += prior
        self.live[self.keys] = (prompt, seen)

    def _check(self) -> None:
        for prompt, seen in self.live.values():
            assert seen.ids == expected_answer(prompt, 4)[: len(seen.ids)]
        over = [key for key, (_, seen) in self.live.items() if seen.ended or seen.error]
        for key in over:
            del self.live[key]

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.run()
            self._check()
            assert not self.live


TakeoverMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTakeoverMachine = TakeoverMachine.TestCase

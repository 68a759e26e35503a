"""What the worker remembers of its pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
from worker_harness import Driver, tiny_runner
from worker_service_harness import PROMPT, driver

from pagemesh.shared.engine_messages import CachedBlocks, NewRow, Step
from pagemesh.shared.hashing import HASH_BYTES, split_hashes
from pagemesh.shared.messages import ModelCard
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.settings import MAX_RUN_AHEAD_STEPS
from pagemesh.shared.wire import pack_ids, unpack_ids
from pagemesh.worker_svc.models.decoder import Decoder
from pagemesh.worker_svc.pages import PageContents

CARD = ModelCard(["tiny"], 97, 64, 4, "float32", [5], 1, "f", 0)


def content(number: int) -> bytes:
    return bytes([number]) * HASH_BYTES


def seal(step: int, *blocks: int) -> Step:
    """Block i holds content i."""
    hashes = b"".join(map(content, blocks))
    return Step(1, step, step - 1, 0, 0, sealed=pack_ids(blocks), sealed_hashes=hashes)


def overwriting(**fields: object) -> Step:
    return Step(1, 9, 8, 0, 0, **fields)  # type: ignore[arg-type]


def entering(blocks: list[int], computed: int) -> Step:
    row = NewRow(0, b"", 1, 0, SamplingParams(), pack_ids(blocks), computed)
    return overwriting(new=[row])


def told(pages: PageContents) -> list[int]:
    """The blocks that are told, each with its content, in order."""
    frames = pages.told(1, CARD)
    blocks = [block for held in frames for block in unpack_ids(held.blocks)]
    hashes = [one for held in frames for one in split_hashes(held.hashes)]
    assert hashes == [content(block) for block in blocks]
    return blocks


def sealed_pages(*blocks: int) -> PageContents:
    pages = PageContents(20)
    pages.follow(seal(1, *blocks), [], 4)
    return pages


@pytest.mark.parametrize(
    ("step", "left"),
    [
        (overwriting(grown=pack_ids([3, 7, 2, 8])), {6, 9}),
        (overwriting(copies=pack_ids([6, 9])), {6, 7, 8}),
        (entering([6, 7, 8, 10], 8), {6, 7, 9}),
        (entering([6, 7, 8, 10], 7), {6, 9}),
        (entering([6, 7, 8, 10], 0), {9}),
    ],
    ids=["grown", "copied", "new", "new-within-a-block", "new-from-the-start"],
)
def test_a_block_that_is_about_to_be_written_is_forgotten(step: Step, left: set[int]) -> None:
    pages = sealed_pages(6, 7, 8, 9)
    pages.follow(step, [], 4)
    assert set(told(pages)) == left


def test_the_order_is_that_of_the_last_use_and_heads_outlive_tails() -> None:
    pages = sealed_pages(1, 2, 3, 4, 5, 6)
    tables: Iterable[list[int]] = ([1, 2, 3], [4, 5], [1, 6])
    for table in tables:
        pages.release(np.array(table))
    assert told(pages) == [3, 2, 5, 4, 6, 1]


def test_after_a_row_that_went_wrong_nothing_is_told_that_its_scheduler_may_not_mean() -> None:
    pages = sealed_pages(1, 2)
    pages.distrust(step=20)
    # It was sent before the scheduler heard of step 20.
    pages.follow(seal(20 + MAX_RUN_AHEAD_STEPS, 3), [], 4)
    pages.follow(seal(21 + MAX_RUN_AHEAD_STEPS, 4), [], 4)
    assert told(pages) == [4]


def test_the_next_scheduler_counts_its_steps_anew() -> None:
    pages = sealed_pages(1)
    pages.distrust(step=1000)
    assert told(pages) == []
    pages.follow(seal(1, 2), [], 4)
    assert told(pages) == [2]


@pytest.mark.parametrize(
    "step",
    [
        seal(1, 20),
        seal(1, 3)._replace(sealed_hashes=content(3) * 2),
        seal(1, 3)._replace(sealed_hashes=content(3)[1:]),
        seal(1, 3)._replace(sealed=b"123"),
    ],
)
def test_what_does_not_fit_the_pool_is_refused(step: Step) -> None:
    with pytest.raises((ValueError, IndexError)):
        PageContents(20).follow(step, [], 4)


def sealing(books: Driver, work: dict[int, int], *blocks: int) -> Step:
    sealed = seal(1, *blocks)
    return books.plan(work)._replace(sealed=sealed.sealed, sealed_hashes=sealed.sealed_hashes)


@pytest.mark.parametrize("breaks", [False, True])
async def test_the_next_scheduler_is_told_before_it_is_offered_the_engine(
    start: Callable, decoder: Decoder, breaks: bool
) -> None:
    """Unless a row of the last step went wrong, here one that computes what nobody knows."""
    runner = tiny_runner(decoder)
    async with start(lambda _settings, _report: runner) as worker:
        async with worker.scheduler("old") as old:
            await old.engines()  # and was told nothing
            books = driver()
            books.enter(0, PROMPT)
            old.link.send(books.plan({0: 4}))
            await old.tokens()
            block = books.slots[0].blocks[0]
            old.link.send(sealing(books, {0: 1 + breaks}, block))
            await old.tokens()
        async with worker.scheduler("young", term=2) as young:
            if not breaks:
                held = await young.next(CachedBlocks)
                assert held == CachedBlocks(
                    young.link.peer.epoch, "f", 4, pack_ids([block]), content(block)
                )
            assert len((await young.engines()).engines) == 1

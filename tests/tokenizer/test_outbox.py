"""Merging of deltas while a gateway is behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from pagemesh.shared.distribution import HOP_S, Observations
from pagemesh.shared.messages import Begun, Delta, Deltas, TokenLogprob, WireError
from pagemesh.shared.wire import BadFrame, Message, pack_ids
from pagemesh.tokenizer_svc.outbox import Outbox, merge, size_bytes

ENTRY = TokenLogprob(5, "a", b"a", -1.0, 1, [(5, "a", b"a", -1.0, 1)])

deltas = st.builds(
    Delta,
    request_id=st.just("r"),
    choice=st.just(0),
    text=st.text(max_size=4),
    token_ids=st.lists(st.integers(0, 9), max_size=3).map(pack_ids),
    logprobs=st.none() | st.lists(st.just(ENTRY), max_size=3),
    prompt_logprobs=st.none() | st.just([None, ENTRY]),
    cached_tokens=st.integers(0, 9),
    vector=st.sampled_from([b"", bytes(8)]),
)


@given(first=deltas, second=deltas)
def test_a_merged_delta_holds_all_of_both(first: Delta, second: Delta) -> None:
    merged = merge(first, second)
    assert merged.text == first.text + second.text
    assert merged.token_ids == first.token_ids + second.token_ids
    assert (merged.logprobs or []) == (first.logprobs or []) + (second.logprobs or [])
    assert merged.prompt_logprobs == (first.prompt_logprobs or second.prompt_logprobs)
    assert merged.vector == (first.vector or second.vector)


def test_the_end_of_a_choice_survives_merging() -> None:
    last = Delta("r", 0, "b", pack_ids([2]), finish_reason="stop", stop_reason="x")
    merged = merge(Delta("r", 0, "a", pack_ids([1])), last)
    assert (merged.text, merged.finish_reason, merged.stop_reason) == ("ab", "stop", "x")


@given(first=deltas, second=deltas)
def test_size_is_additive(first: Delta, second: Delta) -> None:
    """What comes once for a choice is in one of them."""
    scored = first.prompt_logprobs and second.prompt_logprobs
    if not (scored or (first.vector and second.vector)):
        merged = merge(first, second)
        assert size_bytes(merged) == size_bytes(first) + size_bytes(second)


FRAME_CHARS = 100


class BusyLink:
    """A link whose gateway reads one frame whenever the test lets it."""

    name = "gateway-1"

    def __init__(self) -> None:
        self.sent: asyncio.Queue[Message] = asyncio.Queue()
        self.read = asyncio.Semaphore(0)
        self.crash: Exception | None = None
        self.aborted: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def abort(self, reason: str) -> None:
        self.aborted.set_result(reason)

    def send(self, message: Message) -> None:
        assert isinstance(message, Deltas)
        if self.crash is not None:
            raise self.crash
        if sum(len(row.text) for row in message.rows) > FRAME_CHARS:
            raise BadFrame("over the frame limit")
        self.sent.put_nowait(message)

    async def drained(self) -> None:
        await self.read.acquire()


@pytest.fixture
async def link() -> BusyLink:
    return BusyLink()


@pytest.fixture
async def token_s() -> Observations:
    return Observations(HOP_S)


@pytest.fixture
async def box(link: BusyLink, token_s: Observations) -> AsyncIterator[Outbox]:
    outbox = Outbox(link, token_s)  # type: ignore[arg-type]
    sender = asyncio.create_task(outbox.run())
    yield outbox
    sender.cancel()
    await asyncio.gather(sender, return_exceptions=True)


def delta(text: str, choice: int = 0) -> Delta:
    return Delta("r", choice, text, b"")


async def rows(link: BusyLink) -> list[tuple[int, str]]:
    frame = await link.sent.get()
    assert isinstance(frame, Deltas)
    return [(row.choice, row.text) for row in frame.rows]


async def test_a_tick_is_one_frame_and_a_busy_link_gets_bigger_ones(
    box: Outbox, link: BusyLink
) -> None:
    box.add(delta("a"))
    box.add(delta("x", choice=1))
    assert await rows(link) == [(0, "a"), (1, "x")]
    box.add(delta("b"))
    box.add(delta("c"))
    box.add(delta("y", choice=1))
    assert link.sent.empty()
    link.read.release()
    assert await rows(link) == [(0, "bc"), (1, "y")]


async def test_text_before_an_error_is_sent_before_it(box: Outbox, link: BusyLink) -> None:
    error = WireError(500, None, None, "broken")
    link.read.release()
    box.add(delta("a"))
    box.add(delta("")._replace(error=error))
    assert await rows(link) == [(0, "a")]
    frame = await link.sent.get()
    assert isinstance(frame, Deltas)
    assert frame.rows[0].error == error


async def test_what_is_too_much_for_one_frame_goes_in_several(box: Outbox, link: BusyLink) -> None:
    box.add(delta("a" * 80, choice=0))
    box.add(delta("b" * 200, choice=1))
    box.add(delta("c" * 80, choice=2))
    assert await rows(link) == [(0, "a" * 80)]
    frame = await link.sent.get()
    assert isinstance(frame, Deltas)
    assert frame.rows[0].choice == 1
    assert frame.rows[0].error is not None
    assert await rows(link) == [(2, "c" * 80)]


async def test_nothing_is_sent_for_a_forgotten_request(box: Outbox, link: BusyLink) -> None:
    box.add(delta("a"))
    box.forget("r")
    box.add(delta("b")._replace(request_id="other"))
    assert await rows(link) == [(0, "b")]


async def test_the_beginning_of_a_forgotten_request_is_not_told(
    box: Outbox, link: BusyLink
) -> None:
    for request_id in ("r", "other"):
        box.begin(Begun(request_id, 0, "engine-1", 0, 0.0, 0.0))
        box.add(delta("a")._replace(request_id=request_id))
    box.forget("r")
    frame = await link.sent.get()
    assert isinstance(frame, Deltas)
    assert [begun.request_id for begun in frame.begun] == ["other"]


async def test_the_wait_of_forgotten_tokens_is_not_that_of_the_next(
    box: Outbox, link: BusyLink, token_s: Observations
) -> None:
    an_hour_s = 3600.0
    box.arrived(time.monotonic() - an_hour_s)
    box.add(delta("a"))
    box.forget("r")
    box.arrived(time.monotonic())
    box.add(delta("b")._replace(request_id="other"))
    assert await rows(link) == [(0, "b")]
    assert sum(token_s.so_far().counts) == 1
    assert token_s.so_far().total < an_hour_s


async def test_a_sender_that_fails_says_so_and_takes_its_link_along(
    box: Outbox, link: BusyLink
) -> None:
    link.crash = ArithmeticError("broken")
    with capture_logs() as lines:
        box.add(delta("a"))
        assert await link.aborted == "its sender failed"
    [line] = lines
    assert (line["event"], line["gateway"]) == ("outbox_failed", "gateway-1")

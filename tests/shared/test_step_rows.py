"""The decode order: both ends have the same rows after any run of frames."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from pagemesh.shared.engine_messages import Step
from pagemesh.shared.step_rows import RowTable, StepRows
from pagemesh.shared.wire import decode, encode, pack_ids

SLOTS = range(12)
Pairs = list[tuple[int, int]]


def step(
    decoding: Iterable[int], chunks: Pairs = (), *, base: int = 1, **changes: list[int]
) -> Step:
    """A frame after which `decoding` slots decode, as it arrives at the other end."""
    order = list(decoding)
    sent = Step(
        epoch=1,
        step=base + 1,
        base=base,
        n_rows=len(order) + len(chunks),
        n_tokens=len(order) + sum(n for _, n in chunks),
        chunks=pack_ids(n for chunk in chunks for n in chunk),
        **{name: pack_ids(slots) for name, slots in changes.items()},
    )
    received = decode(encode(sent))
    assert isinstance(received, Step)
    return received


def pairs(rows: RowTable) -> Pairs:
    return list(zip(rows.slots, rows.n_tokens, strict=True))


class OrderMachine(RuleBasedStateMachine):
    """The sender's list of slots against what the receiver makes of the frames."""

    def __init__(self) -> None:
        super().__init__()
        self.receiver = StepRows()
        self.order: list[int] = []
        self.resident: set[int] = set()

    @initialize(slots=st.lists(st.sampled_from(SLOTS), unique=True))
    def begin(self, slots: list[int]) -> None:
        self.resident = set(slots)

    @rule(data=st.data(), chunk_tokens=st.lists(st.integers(1, 100), max_size=4))
    def next_step(self, data: st.DataObject, chunk_tokens: list[int]) -> None:
        """Slots leave the worker or pause, others enter, decode or compute a chunk; a slot that is
        given up may enter again in the same step, in its new life off the order."""
        gone = data.draw(subset(self.resident))
        paused = data.draw(subset(set(self.order) - set(gone)))
        stayed = [slot for slot in self.order if slot not in {*gone, *paused}]
        joined = data.draw(subset(self.resident - {*gone, *paused, *stayed}))
        entered = data.draw(subset(set(SLOTS) - self.resident | set(gone)))
        self.resident = self.resident - set(gone) | set(entered)
        self.order = stayed + joined
        free = sorted(self.resident - set(self.order))
        chunks = list(zip(free, chunk_tokens, strict=False))
        frame = step(self.order, chunks, gone=gone, paused=paused, joined=joined)
        assert pairs(self.receiver.follow(frame)) == [*((s, 1) for s in self.order), *chunks]

    @rule()
    def steady_step(self) -> None:
        frame = step(self.order)
        assert self.receiver.follow(frame) is self.receiver.follow(frame)
        assert pairs(self.receiver.follow(frame)) == [(slot, 1) for slot in self.order]
        assert len(encode(frame)) < 40

    @rule(data=st.data())
    def snapshot(self, data: st.DataObject) -> None:
        """The batch is sent anew, and whoever decodes joins again, in any order."""
        self.order = data.draw(st.permutations(self.order))
        self.receiver.clear()
        frame = step(self.order, base=0, joined=self.order)
        assert pairs(self.receiver.follow(frame)) == [(slot, 1) for slot in self.order]


def subset(slots: set[int]) -> st.SearchStrategy[list[int]]:
    """Some of `slots`, in any order."""
    return st.lists(st.sampled_from(sorted(slots)), unique=True) if slots else st.just([])


TestOrderMachine = OrderMachine.TestCase


@given(st.lists(st.sampled_from(SLOTS), unique=True, min_size=1), st.integers(0, 3))
def test_a_frame_that_counts_other_rows_is_refused(slots: list[int], n_rows: int) -> None:
    frame = step(slots, joined=slots)
    wrong = frame._replace(n_rows=n_rows)
    if n_rows != len(slots):
        with pytest.raises(ValueError, match="rows"):
            StepRows().follow(wrong)
    with pytest.raises(ValueError, match="tokens"):
        StepRows().follow(frame._replace(n_tokens=len(slots) + 1))


@pytest.mark.parametrize("field", ["gone", "paused", "joined", "chunks"])
def test_damaged_arrays_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match="multiple"):
        StepRows().follow(step([1], joined=[1])._replace(**{field: b"\0\0\0"}))


def test_a_chunk_without_its_count_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk"):
        StepRows().follow(step([])._replace(chunks=pack_ids([1]), n_rows=1))


def test_rows_already_handed_out_do_not_change() -> None:
    rows = StepRows()
    first = rows.follow(step([1, 2], joined=[1, 2]))
    second = rows.follow(step([2, 3], [(5, 7)], gone=[1], joined=[3]))
    assert pairs(first) == [(1, 1), (2, 1)]
    assert pairs(second) == [(2, 1), (3, 1), (5, 7)]

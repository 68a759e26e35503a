"""Which rows a step computes: the one rule that both ends of a worker's link follow.

Most rows of a step are decodes, the same as in the step before. So the order of the decoding slots
lasts from step to step, and frames carry only what changes in it (`engine_messages.Step`). It is
lost with the batch: a snapshot begins with an empty one.
"""

from __future__ import annotations

from array import array
from typing import Final, NamedTuple

from pagemesh.shared.engine_messages import Step
from pagemesh.shared.wire import unpack_ids

_ONE: Final = array("i", [1])


class RowTable(NamedTuple):
    """Row i computes `n_tokens[i]` tokens of `slots[i]`; int32. Not to be changed."""

    slots: array[int]
    n_tokens: array[int]


class StepRows:
    """The decoding slots after the last step, in order."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """The batch is empty: before a snapshot, and after a step that did not fit."""
        self._decoding = RowTable(array("i"), array("i"))

    def follow(self, step: Step) -> RowTable:
        """Rows of `step`, which follows the last one; the same object while nothing changes.

        Raises ValueError when the step counts other rows or tokens, or its fields are damaged.
        """
        if step.gone or step.paused or step.joined:
            self._decoding = self._changed(step)
        rows, n_tokens = self._decoding, len(self._decoding.slots)
        if step.chunks:
            rows = _with_chunks(rows, step.chunks)
            n_tokens = sum(rows.n_tokens)
        if (len(rows.slots), n_tokens) != (step.n_rows, step.n_tokens):
            found = f"{len(rows.slots)} rows, {n_tokens} tokens"
            raise ValueError(f"{found}, not {step.n_rows} and {step.n_tokens}")
        return rows

    def _changed(self, step: Step) -> RowTable:
        left = {*unpack_ids(step.gone), *unpack_ids(step.paused)}
        kept = [slot for slot in self._decoding.slots if slot not in left]
        slots = array("i", kept + unpack_ids(step.joined))
        return RowTable(slots, _ONE * len(slots))


def _with_chunks(decoding: RowTable, packed: bytes) -> RowTable:
    """Chunks are packed pairs (slot, tokens)."""
    pairs = array("i", unpack_ids(packed))
    if len(pairs) % 2:
        raise ValueError("a chunk has no count of tokens")
    return RowTable(decoding.slots + pairs[::2], decoding.n_tokens + pairs[1::2])

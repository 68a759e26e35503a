"""Logprob rows as the gateway shows them: text and bytes beside ids, values always finite."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from pagemesh.shared.engine_messages import LogprobRow, PromptLogprobs
from pagemesh.shared.messages import TokenLogprob
from pagemesh.shared.wire import unpack_ids
from pagemesh.tokenizer_svc.text_model import TextModel

# What stands for minus infinity, which JSON cannot hold.
LOWEST_LOGPROB: Final = -9999.0
# How many entries are formatted in a few milliseconds.
PIECE_ENTRIES: Final = 4096
_ID_BYTES: Final = 4


def token_logprob(text_model: TextModel, row: LogprobRow, top: int) -> TokenLogprob:
    """`top` of the row's ids are the best ones."""
    ids, values = unpack_ids(row.ids), _floats(row.values)
    shown = _format(text_model, ids[: 1 + top], values[: 1 + top], row.rank)
    if len(ids) <= 1 + top:
        return shown
    best = {token_id for token_id, *_ in shown.top}
    pairs = zip(ids[1 + top :], values[1 + top :], strict=True)
    more = {token_id: value for token_id, value in pairs if token_id not in best}
    vocabulary = text_model.vocabulary
    asked = [(*vocabulary.shown(token_id), finite(value), 0) for token_id, value in more.items()]
    return shown._replace(top=[*shown.top, *asked])


def pieces(
    chunks: Iterable[PromptLogprobs], max_entries: int = PIECE_ENTRIES
) -> Iterator[PromptLogprobs]:
    """The same rows in chunks of about `max_entries` ids and values."""
    for chunk in chunks:
        positions = max(1, max_entries // chunk.width)
        piece_bytes = _ID_BYTES * positions
        for at in range(0, len(chunk.ranks), piece_bytes):
            row = slice(at * chunk.width, (at + piece_bytes) * chunk.width)
            yield chunk._replace(
                start=chunk.start + at // _ID_BYTES,
                ids=chunk.ids[row],
                values=chunk.values[row],
                ranks=chunk.ranks[at : at + piece_bytes],
            )


def prompt_token_logprobs(text_model: TextModel, chunk: PromptLogprobs) -> list[TokenLogprob]:
    """One entry per position of `chunk`, from its `start` on."""
    ids, values, width = unpack_ids(chunk.ids), _floats(chunk.values), chunk.width
    return [
        _format(text_model, ids[at : at + width], values[at : at + width], rank)
        for at, rank in zip(range(0, len(ids), width), unpack_ids(chunk.ranks), strict=True)
    ]


def _format(
    text_model: TextModel, ids: Sequence[int], values: Sequence[float], rank: int
) -> TokenLogprob:
    """`ids[0]` is the chosen token, the others are the best ones, most probable first."""
    shown = map(text_model.vocabulary.shown, ids)
    entries = [(*token, finite(value)) for token, value in zip(shown, values, strict=True)]
    top = [(*entry, place) for place, entry in enumerate(entries[1:], start=1)]
    return TokenLogprob(*entries[0], rank, top)


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB) if math.isfinite(logprob) else LOWEST_LOGPROB


def _floats(packed: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(packed) // 4}f", packed)

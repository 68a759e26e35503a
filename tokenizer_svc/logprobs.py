"""Logprob rows as the gateway shows them: text and bytes beside ids, values always finite."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Final

from pagemesh.shared.wire import LogprobRow, PromptLogprobs, TokenLogprob, unpack_ids
from pagemesh.tokenizer_svc.text_model import TextModel

# What stands for minus infinity, which JSON cannot hold.
LOWEST_LOGPROB: Final = -9999.0


def token_logprob(text_model: TextModel, row: LogprobRow) -> TokenLogprob:
    return _format(text_model, unpack_ids(row.ids), _floats(row.values), row.rank)


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
    entries = [
        (token_id, text_model.token_str(token_id), text_model.token_bytes(token_id), finite(value))
        for token_id, value in zip(ids, values, strict=True)
    ]
    top = [(*entry, place) for place, entry in enumerate(entries[1:], start=1)]
    return TokenLogprob(*entries[0], rank, top)


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB) if math.isfinite(logprob) else LOWEST_LOGPROB


def _floats(packed: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(packed) // 4}f", packed)

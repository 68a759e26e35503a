"""What a scripted engine says, frames built from plain ids, and the text that comes of it."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from pagemesh.shared.engine_messages import Ended, LogprobRow, PromptLogprobs, Tokens
from pagemesh.shared.messages import (
    Capacity,
    Delta,
    EngineStats,
    EngineStatus,
    Generate,
    ModelCard,
    Prompt,
)
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.wire import pack_ids
from pagemesh.tokenizer_svc.text_model import TextModel

CAPACITY = Capacity(64, 4, 512, 1024, "cpu")


def card_of(model: TextModel, *, max_model_len: int = 128, block_tokens: int = 4) -> ModelCard:
    prepared = model.prepared
    return ModelCard(
        names=list(model.names),
        vocab_tokens=prepared.vocab_tokens,
        max_model_len=max_model_len,
        block_tokens=block_tokens,
        dtype="float32",
        eos_token_ids=prepared.eos_token_ids,
        bos_token_id=prepared.bos_token_id,
        fingerprint=prepared.fingerprint,
        created_s=prepared.created_s,
    )


def status_of(card: ModelCard, engine_id: str = "engine-1", **stats: Any) -> EngineStatus:
    return EngineStatus(engine_id, card, CAPACITY, EngineStats(**stats))


def generate(
    prompt: str | list[int] | Prompt = "Hello", request_id: str = "r1", **fields: Any
) -> Generate:
    """`fields` of the Generate; all others go into the sampling parameters."""
    frame = {name: fields.pop(name) for name in list(fields) if name in Generate.__struct_fields__}
    params = SamplingParams(**{"seed": 7, "max_tokens": 64, **fields})
    return Generate(
        **{"attempt": 1, "model": "small", "prompt": _prompt(prompt), **frame},
        request_id=request_id,
        params=params,
    )


def _prompt(given: str | list[int] | Prompt) -> Prompt:
    if isinstance(given, str):
        return Prompt(text=given)
    return Prompt(token_ids=pack_ids(given)) if isinstance(given, list) else given


def tokens(
    rows: Mapping[int, Sequence[int]] | None = None,
    *,
    ended: Sequence[Ended] = (),
    engine_id: str = "engine-1",
    **fields: Any,
) -> Tokens:
    """A frame in which each key of `rows` gained the ids beside it."""
    rows = rows or {}
    return Tokens(
        engine_id,
        keys=pack_ids(rows),
        counts=pack_ids(map(len, rows.values())),
        ids=pack_ids(i for ids in rows.values() for i in ids),
        ended=list(ended),
        **fields,
    )


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def logprob_row(key: int, ids: Sequence[int], values: Sequence[float], rank: int) -> LogprobRow:
    return LogprobRow(key, pack_ids(ids), floats(*values), rank)


def prompt_logprobs(
    key: int, start: int, entries: Sequence[Sequence[tuple[int, float]]], ranks: Sequence[int]
) -> PromptLogprobs:
    """`entries` per position: (id, value) of the chosen token, then of the best ones."""
    flat = [pair for entry in entries for pair in entry]
    return PromptLogprobs(
        key,
        start,
        width=len(entries[0]),
        ids=pack_ids(i for i, _ in flat),
        values=floats(*(value for _, value in flat)),
        ranks=pack_ids(ranks),
    )


def text_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)

"""When an answer is over, as far as token ids tell. Stop strings live where text lives."""

from __future__ import annotations

from typing import NamedTuple

from pagemesh.scheduler_svc.request import Request


class Stop(NamedTuple):
    """`token_id`: the stop token if the caller named it, else None (the model's end, length)."""

    reason: str
    token_id: int | None = None


def stop_after(request: Request, token: int, eos_ids: frozenset[int]) -> Stop | None:
    """Whether `token`, the last of `request.ids`, ends the answer.

    The model's end comes first, then the caller's stop tokens, then the length.
    """
    n_answer = len(request.ids) - request.n_prompt
    if token in request.stop_ids and n_answer > request.params.min_tokens:
        own_end = token in eos_ids and not request.params.ignore_eos
        return Stop("stop", None if own_end else token)
    if len(request.ids) >= request.max_length:
        return Stop("length")
    return None

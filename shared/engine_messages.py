"""Messages of the engines: tokenizer ⇄ scheduler, scheduler ⇄ worker. Once per step each, so a
steady decode step costs no maps and no objects per token: arrays travel as bytes (see `messages`).
"""

from __future__ import annotations

from typing import NamedTuple

from pagemesh.shared.messages import WireError
from pagemesh.shared.pooling import PoolingParams
from pagemesh.shared.sampling import SamplingParams

# -- tokenizer ⇄ scheduler ------------------------------------------------------------------------


class Submit(NamedTuple):
    """One choice of one request, for one engine. `key` is drawn by the sender, unique on the link,
    new for each attempt. `hashes` are those of the prompt's full blocks, packed. Choices of one
    `group` share a prompt: choices above 0 fork the blocks of choice 0.

    One that `parks` gets one token, then stays with its blocks until it is ended or others need
    them; who begins with its prompt, and names its key as `parent`, forks them. For an engine in
    which nobody else decodes, who would preempt it."""

    key: int
    request_id: str
    attempt: int
    engine_id: str
    prompt_ids: bytes
    prior_ids: bytes
    seed: int
    params: SamplingParams
    hashes: bytes
    priority: int = 0
    arrival_s: float = 0.0
    cache_salt: str = ""
    group: str = ""
    choice: int = 0
    pooling: PoolingParams | None = None
    parks: bool = False
    parent: int = -1


class End(NamedTuple):
    """The sender needs no more tokens. `reason` is "stop" (a stop string matched) or "abort"."""

    keys: list[int]
    reason: str


class ForgetCached(NamedTuple):
    """The engine forgets what it has cached and no request uses."""

    engine_id: str


class Ended(NamedTuple):
    """An engine's last word on a request. `finish_reason`: stop, length or abort."""

    key: int
    finish_reason: str
    stop_reason: int | None = None


class Started(NamedTuple):
    """A request's first token here is in this frame: it waited `queue_s` for its first step, then
    took `prefill_s` to that token. `cached_tokens` of its prompt did not have to be computed."""

    key: int
    cached_tokens: int
    queue_s: float = 0.0
    prefill_s: float = 0.0


class LogprobRow(NamedTuple):
    """`ids[0]` is the chosen token, then come the top-k, best first, then those that were asked for
    by id; `values` float32."""

    key: int
    ids: bytes
    values: bytes
    rank: int


class PromptLogprobs(NamedTuple):
    """Rows for prompt positions `start` …: the token at that position and its top-k, `width` ids
    per position (chosen first). Position 0 has no row."""

    key: int
    start: int
    width: int
    ids: bytes
    values: bytes
    ranks: bytes


class Pooled(NamedTuple):
    """The whole prompt of `key` as one vector, packed float32."""

    key: int
    vector: bytes


class Tokens(NamedTuple):
    """All that one engine's step brought to one link. Rows: `keys[i]` gained `counts[i]` tokens of
    `ids`, in order (counts is 1 without speculation). `failed` ends a request in error."""

    engine_id: str
    keys: bytes
    counts: bytes
    ids: bytes
    ended: list[Ended] = []
    started: list[Started] = []
    logprobs: list[LogprobRow] = []
    prompt_logprobs: list[PromptLogprobs] = []
    failed: list[tuple[int, WireError]] = []
    pooled: list[Pooled] = []


class Lost(NamedTuple):
    """The engine's worker is gone; these may be submitted again anywhere with their prior ids."""

    engine_id: str
    keys: list[int]


# -- scheduler ⇄ worker ---------------------------------------------------------------------------


class NewRow(NamedTuple):
    """Full state of a request entering a slot. `ids` = prompt + prior ids (all known tokens);
    `computed` tokens are already in `blocks`. `n_prompt` counts the true prompt (penalties).
    `request_id` names the request in the worker's logs. With `pooling` the hidden states of all of
    `ids` from `computed` on are pooled."""

    slot: int
    ids: bytes
    n_prompt: int
    seed: int
    params: SamplingParams
    blocks: bytes
    computed: int
    request_id: str = ""
    pooling: PoolingParams | None = None


class Step(NamedTuple):
    """One step of the batch, a diff against step `base`.

    Steps count from 1. `base` 0 is a snapshot: a diff against an empty batch, so the worker drops
    every row it had and takes over `epoch`; other steps must carry that epoch and `base` = the
    last step.

    Applied in this order: `gone` slots are freed, `new` rows enter, `grown` (packed pairs slot,
    block) appends a block to each slot's table, `copies` (packed pairs src, dst) are made, then the
    rows compute. `shared.step_rows` says which they are: slots that decode, in an order that lasts
    from step to step, one token each, then `chunks` (packed pairs slot, tokens), for this step
    alone. `paused` and `gone` slots leave that order and `joined` ones go to its end. So a
    steady decode step names no row at all; `n_rows` and `n_tokens` count them.

    A row samples one token exactly when its computed count catches up with its known tokens; the
    sampled token becomes known, so step N+1 needs counts only. A step without rows launches no
    model. `sealed` blocks now hold the content of `sealed_hashes` (packed, one each).
    """

    epoch: int
    step: int
    base: int
    n_rows: int
    n_tokens: int
    gone: bytes = b""
    new: list[NewRow] = []
    grown: bytes = b""
    copies: bytes = b""
    paused: bytes = b""
    joined: bytes = b""
    chunks: bytes = b""
    sealed: bytes = b""
    sealed_hashes: bytes = b""


class StepResult(NamedTuple):
    """`sampled[i]` belongs to row i of the step, -1 where the row did not sample. `nonfinite` rows
    had NaN or inf logits: their sampled value is meaningless. In logprob rows and of `pooled` ones
    `key` is the row index. `failed` rows could not be computed (error text); the step's other rows
    are good. `elapsed_s` is the computation, `inside_s` all the time between the step's arrival at
    the worker and the result's departure."""

    epoch: int
    step: int
    sampled: bytes
    nonfinite: list[int] = []
    logprobs: list[LogprobRow] = []
    prompt_logprobs: list[PromptLogprobs] = []
    failed: list[tuple[int, str]] = []
    elapsed_s: float = 0.0
    inside_s: float = 0.0
    pooled: list[Pooled] = []


class CachedBlocks(NamedTuple):
    """What full blocks of a worker hold: `blocks` (packed) and their `hashes` (packed), least
    recently used first. A worker sends as many of these as it takes before it offers its engine,
    and only of its own `epoch`: a scheduler that takes over finds the prefix cache warm."""

    epoch: int
    fingerprint: str
    block_tokens: int
    blocks: bytes
    hashes: bytes


class NeedSnapshot(NamedTuple):
    """The worker saw a gap in `step`; every running request must be sent again as new."""

    epoch: int
    last_step: int

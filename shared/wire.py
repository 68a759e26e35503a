"""Every message of the mesh, defined once.

A frame is one msgpack array `[tag, *fields]`; a message is a NamedTuple, so a steady decode step
costs no maps and no per-token objects. Integer arrays travel as little-endian int32 bytes
(`pack_ids`, `unpack_ids`), float arrays as little-endian float32 bytes.

Direction: gateway ─ Generate, Cancel, Tokenize, Detokenize → tokenizer ─ Submit, End → scheduler
─ Step → worker, and back up StepResult → Tokens, Lost → Accepted, Deltas, Failed.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import msgpack
import msgspec

from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.step_stats import StepStats

PROTOCOL: Final = 1
MAX_FRAME_BYTES: Final = 64 * 2**20


# -- handshake ------------------------------------------------------------------------------------


class ModelCard(NamedTuple):
    """What every service must agree on about a model. `names[0]` is the primary served name."""

    names: list[str]
    vocab_tokens: int
    max_model_len: int
    block_tokens: int
    dtype: str
    eos_token_ids: list[int]
    bos_token_id: int | None
    fingerprint: str
    created_s: int


class Capacity(NamedTuple):
    """What a worker group offers its scheduler. `num_blocks` counts the null block 0, which holds
    no request's tokens."""

    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_bytes_per_token: int
    device: str


class EngineStats(NamedTuple):
    """State of one engine, as the metrics and the dispatcher want it. Totals only grow.

    `waiting_deferred` of the `waiting` wait for a prompt that another computes. Token counts of
    the prefix cache are of first admissions; `readmitted_` ones of those after a preemption."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    preemptions_total: int = 0
    prefix_query_tokens_total: int = 0
    prefix_hit_tokens_total: int = 0
    waiting_deferred: int = 0
    readmitted_query_tokens_total: int = 0
    readmitted_hit_tokens_total: int = 0
    steps: StepStats = StepStats()


class EngineStatus(NamedTuple):
    engine_id: str
    card: ModelCard
    capacity: Capacity
    stats: EngineStats


class Hello(NamedTuple):
    """First frame of each side. `epoch` is the incarnation of the process (start time, ns)."""

    protocol: int
    service: str
    instance_id: str
    epoch: int
    secret: str
    engines: list[EngineStatus] = []


class Refused(NamedTuple):
    reason: str


class Echo(NamedTuple):
    """Measures a link: who gets it unanswered sends it back. `sent_s` is of the sender's clock."""

    sent_s: float
    answered: bool = False


class Engines(NamedTuple):
    """Pushed upstream when engines come, go or change load. Replaces the sender's last list."""

    engines: list[EngineStatus]
    draining: bool = False


class WireError(NamedTuple):
    status: int
    code: str | None
    param: str | None
    message: str


# -- gateway ⇄ tokenizer --------------------------------------------------------------------------


class Prompt(NamedTuple):
    """Exactly one of `messages`, `text` and `token_ids` is given."""

    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    token_ids: bytes | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = {}


class Generate(NamedTuple):
    """`params.n` choices of one prompt. `params.seed` is always set. `prior_ids` holds, for each
    choice, what it had generated before a resume (empty list: a fresh request)."""

    request_id: str
    attempt: int
    model: str
    prompt: Prompt
    params: SamplingParams
    priority: int = 0
    arrival_s: float = 0.0
    cache_salt: str = ""
    prior_ids: list[bytes] = []
    want_prompt_text: bool = False


class Cancel(NamedTuple):
    request_id: str


class Tokenize(NamedTuple):
    request_id: str
    model: str
    prompt: Prompt
    want_token_strs: bool = False


class Detokenize(NamedTuple):
    request_id: str
    model: str
    token_ids: bytes


class Accepted(NamedTuple):
    """The prompt passed every check and is on its way to an engine."""

    request_id: str
    prompt_ids: bytes
    prompt_text: str | None = None


class TokenLogprob(NamedTuple):
    """Logprob of one token and the best alternatives, most probable first. Raw-model values, always
    finite. `data` are the token's raw bytes (half a character is representable)."""

    token_id: int
    token: str
    data: bytes
    logprob: float
    rank: int
    top: list[tuple[int, str, bytes, float, int]] = []


class Delta(NamedTuple):
    """What one choice gained since its last delta.

    `finish_reason` is None until the last delta of the choice, then stop, length or abort.
    `prompt_logprobs` (entry 0 is None) comes once, with choice 0's first delta, when asked for.
    `error` ends the choice in failure; the other fields are then empty.
    """

    request_id: str
    choice: int
    text: str
    token_ids: bytes
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error: WireError | None = None


class Begun(NamedTuple):
    """A choice has its first token of an engine; its delta is in the same frame or a later one.

    `queue_s` it waited there for its first step, then took `prefill_s` to that token;
    `cached_tokens` of the prompt did not have to be computed.
    """

    request_id: str
    choice: int
    engine_id: str
    cached_tokens: int
    queue_s: float
    prefill_s: float


class Deltas(NamedTuple):
    """`begun` is read before the rows."""

    rows: list[Delta]
    begun: list[Begun] = []


class Failed(NamedTuple):
    """The whole request is refused or lost; no further message about it follows."""

    request_id: str
    error: WireError


class Tokenized(NamedTuple):
    request_id: str
    token_ids: bytes
    token_strs: list[str] | None
    max_model_len: int


class Detokenized(NamedTuple):
    request_id: str
    text: str


# -- tokenizer ⇄ scheduler ------------------------------------------------------------------------


class Submit(NamedTuple):
    """One choice of one request, for one engine. `key` is drawn by the sender, unique on the link,
    new for each attempt. `hashes` are those of the prompt's full blocks, packed. Choices of one
    `group` share a prompt: choices above 0 fork the blocks of choice 0."""

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


class End(NamedTuple):
    """The sender needs no more tokens. `reason` is "stop" (a stop string matched) or "abort"."""

    keys: list[int]
    reason: str


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
    """`ids[0]` is the chosen token, the rest are the top-k, best first; `values` float32."""

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


class Lost(NamedTuple):
    """The engine's worker is gone; these may be submitted again anywhere with their prior ids."""

    engine_id: str
    keys: list[int]


# -- scheduler ⇄ worker ---------------------------------------------------------------------------


class NewRow(NamedTuple):
    """Full state of a request entering a slot. `ids` = prompt + prior ids (all known tokens);
    `computed` tokens are already in `blocks`. `n_prompt` counts the true prompt (penalties).
    `request_id` names the request in the worker's logs."""

    slot: int
    ids: bytes
    n_prompt: int
    seed: int
    params: SamplingParams
    blocks: bytes
    computed: int
    request_id: str = ""


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
    had NaN or inf logits: their sampled value is meaningless. In logprob rows `key` is the row
    index. `failed` rows could not be computed (error text); the step's other rows are good.
    `elapsed_s` is the computation, `inside_s` all the time between the step's arrival at the worker
    and the result's departure."""

    epoch: int
    step: int
    sampled: bytes
    nonfinite: list[int] = []
    logprobs: list[LogprobRow] = []
    prompt_logprobs: list[PromptLogprobs] = []
    failed: list[tuple[int, str]] = []
    elapsed_s: float = 0.0
    inside_s: float = 0.0


class NeedSnapshot(NamedTuple):
    """The worker saw a gap in `step`; every running request must be sent again as new."""

    epoch: int
    last_step: int


Message = (
    Hello
    | Refused
    | Engines
    | Generate
    | Cancel
    | Tokenize
    | Detokenize
    | Accepted
    | Deltas
    | Failed
    | Tokenized
    | Detokenized
    | Submit
    | End
    | Tokens
    | Lost
    | Step
    | StepResult
    | NeedSnapshot
    | Echo
)

_TYPES: Final[tuple[type[Any], ...]] = Message.__args__
_TAGS: Final[dict[type[Any], int]] = {kind: tag for tag, kind in enumerate(_TYPES)}
# A fifth of the time that packb takes, for the same bytes.
_pack: Final = msgspec.msgpack.Encoder().encode


class BadFrame(ValueError):
    """Bytes that are no message of this protocol, or a message that no frame can hold."""


def encode(message: Message) -> bytes:
    """The frame of `message`. Raises BadFrame when no peer could take it: it is over
    MAX_FRAME_BYTES, or holds an integer over 64 bits or something that is no data."""
    try:
        packed = _pack((_TAGS[type(message)], *message))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise BadFrame(f"{type(message).__name__} cannot be packed: {error}") from error
    if len(packed) > MAX_FRAME_BYTES:
        raise BadFrame(f"{type(message).__name__} of {len(packed)} bytes is over the frame limit")
    return packed


def decode(frame: bytes) -> Message:
    """The message in `frame`, with every field checked against its type.

    Raises BadFrame, and nothing else, on anything that is not a message.
    """
    try:
        tag, *fields = msgpack.unpackb(frame, strict_map_key=False, use_list=True)
        kind = _TYPES[tag]
        message: Message = msgspec.convert(fields, kind, builtin_types=(bytes,))
    except (ValueError, TypeError, IndexError, RecursionError, msgpack.UnpackException) as error:
        raise BadFrame(f"not a frame of protocol {PROTOCOL}: {error}") from error
    return message


def pack_ids(ids: Iterable[int]) -> bytes:
    """Integers as little-endian int32 bytes. Raises OverflowError outside int32."""
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    packed = array("i", data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()

"""Messages between services: the handshake, what every hop says of engines, and what gateway and
tokenizer services tell each other. Those of the engines are in `engine_messages`.

A message is a NamedTuple, or a msgspec.Struct where making it counts; `wire` makes frames of them.
More fields than a NamedTuple has are a bad frame; those of a Struct would be passed over.
Integer arrays travel as little-endian int32 bytes, float arrays as little-endian float32 bytes.

Direction: gateway ─ Generate, Cancel, Tokenize, Detokenize, Render → tokenizer ─ Submit, End →
scheduler ─ Step → worker, and back up StepResult → Tokens, Lost → Accepted, Deltas, Failed.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec

from pagemesh.shared.pooling import PoolingParams
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.step_stats import StepPace, StepStats
from pagemesh.shared.text_parsers import TextParsers

# -- handshake ------------------------------------------------------------------------------------


class Variant(NamedTuple):
    """What decides the bits that a model generates: its files, and how its weights are kept."""

    fingerprint: str
    dtype: str
    quantization: str


class ModelCard(NamedTuple):
    """What every service must agree on about a model. `names[0]` is the primary served name.

    `parsers` are of the model's text: the tokenizer service says them to the gateways. `defaults`
    are sampling parameters for requests that bring none (see generation_config). `hidden_size` is
    how many numbers an embedding has."""

    names: list[str]
    vocab_tokens: int
    max_model_len: int
    block_tokens: int
    dtype: str
    eos_token_ids: list[int]
    bos_token_id: int | None
    fingerprint: str
    created_s: int
    quantization: str = "none"
    parsers: TextParsers = TextParsers()
    defaults: dict[str, int | float] = {}
    hidden_size: int = 0

    @property
    def variant(self) -> Variant:
        return Variant(self.fingerprint, self.dtype, self.quantization)


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
    the prefix cache are of first admissions; `readmitted_` ones of those after a preemption.
    `prefill_tokens` are known to the engine and not computed, less what the cache is likely to hold
    of them. `index_number` is the engine's in the prefix index; 0: none. `queue_s` is how long
    those that wait will take to be begun, at the present pace."""

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
    prefill_tokens: int = 0
    pace: StepPace = StepPace()
    index_number: int = 0
    queue_s: float = 0.0


class EngineStatus(NamedTuple):
    engine_id: str
    card: ModelCard
    capacity: Capacity
    stats: EngineStats


class Hello(NamedTuple):
    """First frame of each side. `epoch` is the incarnation of the process (start time, ns). A
    scheduler that dials a worker names the term of its lease."""

    protocol: int
    service: str
    instance_id: str
    epoch: int
    secret: str
    engines: list[EngineStatus] = []
    lease_term: int = 0


class Refused(NamedTuple):
    reason: str


class Echo(NamedTuple):
    """Measures a link: who gets it unanswered sends it back. `sent_s` is of the sender's clock."""

    sent_s: float
    answered: bool = False


class Engines(NamedTuple):
    """Pushed upstream when engines come, go or change load. Replaces the sender's last list.

    `names` are those of models that the sender can serve once there is an engine of them."""

    engines: list[EngineStatus]
    draining: bool = False
    names: list[str] = []


class WireError(NamedTuple):
    status: int
    code: str | None
    param: str | None
    message: str
    retry_after_s: float | None = None


# -- gateway ⇄ tokenizer --------------------------------------------------------------------------


class PromptExtras(NamedTuple):
    """What few prompts ask for. `options` are variables that the chat template must know,
    `chat_template` stands in for the model's; `documents` and these go with messages, `suffix`,
    what stands behind the gap to fill, with a text. Of a prompt's tokens the last `truncate_tokens`
    count; -1: as many as fit, 0: all."""

    options: dict[str, str] = {}
    documents: list[dict[str, Any]] = []
    chat_template: str = ""
    suffix: str = ""
    truncate_tokens: int = 0


class Prompt(msgspec.Struct, frozen=True, array_like=True):
    """Exactly one of `messages`, `text` and `token_ids` is given. `tools` go with messages. `field`
    is where it stood in the client's request, unless that is `messages`."""

    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    token_ids: bytes | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []
    field: str = "prompt"
    extras: PromptExtras | None = None


LAST_PRIORITY: Final = 2**31 - 1
"""Of work that nobody waits for: behind all other, whatever the policy of the queue."""


class Generate(msgspec.Struct, frozen=True, array_like=True):
    """`params.n` choices of one prompt. `params.seed` is always set. `prior_ids` holds, for each
    choice, what it had generated before a resume (empty list: a fresh request). Requests of one
    `cache_key` had better run on one engine. `keeps_marks`: what the model's parsers look for stays
    in the text, special tokens or not. With `pooling` the answer is a vector and no token: `params`
    say so, with max_tokens 0."""

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
    cache_key: str = ""
    keeps_marks: bool = False
    pooling: PoolingParams | None = None


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


class Render(NamedTuple):
    """What would be made of `generate`? It is checked and encoded, and goes to no engine."""

    generate: Generate

    @property
    def request_id(self) -> str:
        return self.generate.request_id

    @property
    def model(self) -> str:
        return self.generate.model


class ResetCache(NamedTuple):
    """Forget what the engines of `model` have cached and no request uses."""

    request_id: str
    model: str


class Accepted(NamedTuple):
    """The prompt passed every check and is on its way to an engine. `in_reasoning`: it ends with
    the tag that opens the model's reasoning."""

    request_id: str
    prompt_ids: bytes
    prompt_text: str | None = None
    in_reasoning: bool = False


class TokenLogprob(NamedTuple):
    """Logprob of one token and the best alternatives, most probable first; behind them, with rank
    0, tokens that were asked for. Raw-model values, always finite. `data` are the token's raw bytes
    (half a character is representable)."""

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
    `error` ends the choice in failure; the other fields are then empty. `vector` (packed float32)
    comes with the last delta of a prompt that is pooled.
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
    vector: bytes = b""


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


class Rendered(NamedTuple):
    """The prompt as an engine would get it. `params.max_tokens` is known."""

    request_id: str
    prompt_ids: bytes
    prompt_text: str
    params: SamplingParams


class CacheReset(NamedTuple):
    """These engines were told, before whatever follows over the same links."""

    request_id: str
    engines: list[str]


class Detokenized(NamedTuple):
    request_id: str
    text: str

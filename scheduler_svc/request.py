"""One choice of one request, as the engine sees it.

`ids` are the tokens confirmed so far (prompt, then answer). `length` counts those plus the ones the
worker owes us: it samples a token in every planned step that lets `computed` catch up with
`length`. Scheduling needs these counts only, never the values, so steps are planned ahead.

While running: 0 <= owed, published blocks <= confirmed // block tokens, confirmed <= computed,
computed < length, and `length` exceeds `len(ids)` by what steps in flight will sample.

The loops over all rows touch as little as they can: `due_at` and `wake_length` each stand for all
reasons to look at a decoding request more closely.
"""

from __future__ import annotations

from array import array
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, NamedTuple

from pagemesh.shared.pooling import PoolingParams
from pagemesh.shared.sampling import SamplingParams

if TYPE_CHECKING:
    from pagemesh.scheduler_svc.client import Client

NEVER: Final = 1 << 62
"""A token count no request reaches."""
_TOKEN_BYTES: Final = 8
"""Of its id, and of its share of a block table."""

OrderKey = tuple[int, float, int]
"""(priority, arrival, submission number): smaller is served first and preempted last."""


class Borrower(NamedTuple):
    request: Request
    n_tokens: int
    """That it began with, the lender's the last or among them."""


class Status(Enum):
    HELD = auto()
    """Waits for the leader of its group to have computed their prompt."""
    WAITING = auto()
    PREEMPTED = auto()
    """Waits again, after losing its blocks and slot."""
    RUNNING = auto()
    FINISHED = auto()


class Request:
    """The truth about one request and its counters. Owner: the engine.

    Results in flight stop counting at preemption and at the end. A preempted request runs again
    only when all of them have landed, so a row in flight counts exactly if its request is running.
    Blocks, slot and `due_at` are only set through `residents.Residents`.
    """

    __slots__ = (
        "admitted_step",
        "blocks",
        "borrowers",
        "cache_salt",
        "cached_tokens",
        "choice",
        "client",
        "computed",
        "confirmed",
        "due_at",
        "entry_length",
        "followers",
        "forks",
        "group",
        "hashes",
        "ids",
        "key",
        "leader",
        "length",
        "max_length",
        "n_prompt",
        "order",
        "params",
        "params_bytes",
        "parks",
        "plan_limit",
        "pooling",
        "preemptions",
        "prefill_only",
        "prompt_logprobs_from",
        "publish_at",
        "published",
        "queued_s",
        "request_id",
        "resumed",
        "room_tokens",
        "scheduled_s",
        "seed",
        "slot",
        "stale_until",
        "start_told",
        "status",
        "stop_ids",
        "void",
        "wake_length",
    )

    def __init__(
        self,
        *,
        key: int,
        request_id: str,
        client: Client,
        ids: array[int],
        n_prompt: int,
        max_length: int,
        prefill_only: bool,
        stop_ids: frozenset[int],
        seed: int,
        params: SamplingParams,
        params_bytes: int,
        order: OrderKey,
        hashes: list[bytes],
        cache_salt: str,
        group: str,
        choice: int,
        queued_s: float,
        resumed: bool,
        pooling: PoolingParams | None,
        parks: bool,
    ) -> None:
        self.key = key
        self.request_id = request_id
        self.client = client
        self.ids = ids
        self.n_prompt = n_prompt
        self.max_length = max_length
        """Tokens, prompt included, at which the answer is cut."""
        self.prefill_only = prefill_only
        """The prompt is computed and the token sampled after it dropped."""
        self.parks = parks
        """It is not over with its one token: others may fork its blocks."""
        self.plan_limit = len(ids) + 1 if prefill_only or parks else max_length
        """`length` beyond which nothing is scheduled: the last token is already on its way."""
        self.stop_ids = stop_ids
        self.seed = seed
        self.params = params
        self.params_bytes = params_bytes
        """How large `params` are in a frame."""
        self.order = order
        self.hashes = hashes
        """Chain hashes of the full blocks of `ids`, as far as known."""
        self.cache_salt = cache_salt
        self.group = group
        self.choice = choice
        self.queued_s = queued_s
        self.resumed = resumed
        """An engine that was lost had it before."""
        self.pooling = pooling

        self.status = Status.WAITING
        self.preemptions = 0
        self.stale_until = 0
        """Results of steps up to this one may still bring tokens from before a preemption."""
        self.admitted_step = 0
        self.cached_tokens: int | None = None
        """Prompt tokens that did not have to be computed; None before the first admission."""
        self.scheduled_s = queued_s
        """When it was first admitted to a step."""
        self.start_told = False
        """Whether the client knows of its first token here."""
        self.prompt_logprobs_from = 1 if wants_prompt_logprobs(params, choice) else NEVER
        """First prompt position whose logprobs are still owed to the client."""

        self.leader: Request | None = None
        self.followers: list[Request] = []
        """Choices of the same prompt waiting for this one to compute it."""
        self.forks: list[Request] = []
        """Choices that began with blocks of this one before their content was confirmed."""
        self.borrowers: list[Borrower] = []
        """Other requests that did."""
        self.void = False
        """Preempted because a lender failed: what results in flight bring is worthless."""

        self.slot = -1
        self.blocks: list[int] = []
        self.computed = 0
        self.confirmed = 0
        """Computed tokens whose results have landed; of a decoding request as of its last full
        block, since there it is len(ids) - 1."""
        self.length = len(ids)
        self.entry_length = 0
        """`length` on entering the worker. What lies below it is prefill, down to the last token,
        and a longer request decodes."""
        self.room_tokens = 0
        """Tokens `blocks` have room for."""
        self.due_at = 0
        """`computed` at which a decoding request needs a block, or its last token is on its way."""
        self.published = 0
        self.publish_at = NEVER
        """Confirmed tokens at which the next block is full."""
        self.wake_length = max_length
        """`len(ids)` at which a decoding request has filled a block, or is over."""

    @property
    def computes_all(self) -> bool:
        """Whether the worker must see every token of the prompt, and all of them without a gap: it
        adds up what it makes of them."""
        return self.pooling is not None and self.pooling.reads_all

    @property
    def row_bytes(self) -> int:
        """Roughly what it adds to the frame of the step in which it enters."""
        return self.params_bytes + _TOKEN_BYTES * len(self.ids)

    @property
    def owed(self) -> int:
        """Tokens that steps in flight will sample."""
        return self.length - len(self.ids)

    def next_publication(self, n_confirmed: int) -> None:
        """The next block is full at `n_confirmed` tokens: with the token sampled after them, the
        request is one longer."""
        self.publish_at = n_confirmed
        self.wake_length = min(n_confirmed + 1, self.max_length)

    def forget_borrowers(self) -> None:
        """Those whose tokens are confirmed by now."""
        if self.borrowers:
            left = [borrower for borrower in self.borrowers if borrower.n_tokens > self.confirmed]
            self.borrowers = left

    def forget_progress(self) -> None:
        """Back to nothing computed; results in flight deliver their tokens and count no more."""
        self.computed = self.confirmed = self.published = self.room_tokens = 0
        self.next_publication(NEVER)
        self.length = len(self.ids)


def wants_prompt_logprobs(params: SamplingParams, choice: int) -> bool:
    """Choices above 0 have the prompt of choice 0, and its logprobs."""
    return params.prompt_logprobs is not None and choice == 0

"""From a Submit to a Request: what can never be served is refused here, at once."""

from __future__ import annotations

from array import array

import msgspec

from pagemesh.scheduler_svc.client import Client
from pagemesh.scheduler_svc.queues import order_key
from pagemesh.scheduler_svc.request import OrderKey, Request
from pagemesh.shared.engine_messages import Submit
from pagemesh.shared.errors import RequestError
from pagemesh.shared.hashing import HASH_BYTES, split_hashes
from pagemesh.shared.messages import Capacity, ModelCard
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.wire import unpack_ids

_INT32_MAX = 2**31 - 1


class Intake:
    """The limits of one engine, applied to each new request."""

    def __init__(self, card: ModelCard, capacity: Capacity, policy: str) -> None:
        self._card = card
        self._pool_tokens = (capacity.num_blocks - 1) * card.block_tokens
        self._policy = policy
        self.eos_ids = frozenset(card.eos_token_ids)
        self._count = 0

    def build(self, submit: Submit, client: Client, now_s: float) -> Request:
        """Raises RequestError (400) when the request can never be served."""
        prompt, prior = _decode_ids(submit)
        _require_new_key(submit.key, client)
        # Who parks is not over with the token that ends its answer.
        max_length = self._max_length(len(prompt), submit.params) + submit.parks
        return Request(
            key=submit.key,
            request_id=submit.request_id,
            client=client,
            ids=array("i", prompt + prior),
            n_prompt=len(prompt),
            max_length=max_length,
            prefill_only=len(prompt) + len(prior) >= max_length,
            stop_ids=self._stop_ids(submit.params),
            seed=submit.seed,
            params=submit.params,
            params_bytes=len(msgspec.msgpack.encode(submit.params)),
            order=self._order(submit, now_s),
            hashes=self._hashes(submit, len(prompt)),
            cache_salt=submit.cache_salt,
            group=submit.group,
            choice=submit.choice,
            queued_s=now_s,
            resumed=submit.attempt > 0 or bool(prior),
            pooling=submit.pooling,
            parks=submit.parks,
        )

    def _order(self, submit: Submit, now_s: float) -> OrderKey:
        self._count += 1
        arrival_s = submit.arrival_s or now_s
        return order_key(self._policy, submit.priority, arrival_s, self._count)

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        stops = frozenset(params.stop_token_ids)
        return stops if params.ignore_eos else stops | self.eos_ids

    def _max_length(self, n_prompt: int, params: SamplingParams) -> int:
        """Tokens, prompt included, at which the answer is cut.

        Without `max_tokens` the answer may take what the context and the pool leave.
        """
        wanted = 1 if params.max_tokens is None else params.max_tokens
        self._require_context(n_prompt, wanted)
        self._require_pool(n_prompt + wanted)
        if params.max_tokens is None:
            return min(self._card.max_model_len, self._pool_tokens)
        return n_prompt + params.max_tokens

    def _require_context(self, n_prompt: int, n_answer: int) -> None:
        limit = self._card.max_model_len
        if n_prompt + n_answer > limit:
            raise RequestError(
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{n_prompt + n_answer} tokens ({n_prompt} in the prompt, {n_answer} for the "
                "answer). Please shorten the prompt or the answer.",
                code="context_length_exceeded",
                param="messages" if n_prompt >= limit else "max_tokens",
            )

    def _require_pool(self, n_tokens: int) -> None:
        if n_tokens > self._pool_tokens:
            raise RequestError(
                f"This request needs KV cache for {n_tokens} tokens and the whole pool holds "
                f"{self._pool_tokens}. Shorten it, or give the worker a larger KV cache.",
                code="kv_cache_exceeded",
            )

    def _hashes(self, submit: Submit, n_prompt: int) -> list[bytes]:
        """The sender's hashes, if they are those of all the prompt's full blocks."""
        expected = n_prompt // self._card.block_tokens
        if len(submit.hashes) != expected * HASH_BYTES:
            return []
        return split_hashes(submit.hashes)


def _require_new_key(key: int, client: Client) -> None:
    if key in client.requests or not 0 <= key <= _INT32_MAX:
        raise RequestError(f"key {key} cannot be used", status=500, code="bad_key")


def _decode_ids(submit: Submit) -> tuple[list[int], list[int]]:
    try:
        prompt, prior = unpack_ids(submit.prompt_ids), unpack_ids(submit.prior_ids)
    except ValueError as error:
        raise RequestError(f"token ids are damaged: {error}") from error
    if not prompt:
        raise RequestError("the prompt is empty", param="prompt")
    return prompt, prior

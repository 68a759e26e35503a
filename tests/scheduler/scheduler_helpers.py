"""Builders and a small driver shared by the scheduler's tests."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from worker_model import EOS, EPOCH, VOCAB, WorkerModel, digests_of, next_token

from pagemesh.scheduler_svc.engine import Engine
from pagemesh.shared.engine_messages import NeedSnapshot, Step, StepResult, Submit, Tokens
from pagemesh.shared.messages import Capacity, ModelCard
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.settings import SchedulerSettings
from pagemesh.shared.wire import pack_ids, unpack_ids

OWNER = "tokenizer-1"


def make_card(*, max_model_len: int = 256, block_tokens: int = 4) -> ModelCard:
    return ModelCard(
        names=["tiny"],
        vocab_tokens=VOCAB,
        max_model_len=max_model_len,
        block_tokens=block_tokens,
        dtype="float32",
        eos_token_ids=[EOS],
        bos_token_id=None,
        fingerprint="tiny",
        created_s=0,
    )


def make_capacity(
    *, num_blocks: int = 65, max_num_seqs: int = 8, budget: int = 64, device: str = "cpu"
) -> Capacity:
    return Capacity(num_blocks, max_num_seqs, budget, 1024, device)


def make_submit(
    key: int, prompt: Sequence[int], *, prior: Sequence[int] = (), **fields: Any
) -> Submit:
    """Fields of Submit by name; all others are sampling parameters."""
    own = {name: fields.pop(name) for name in list(fields) if name in Submit._fields}
    fields.setdefault("max_tokens", 8)
    fields.setdefault("ignore_eos", True)
    return Submit(
        key=key,
        request_id=own.pop("request_id", f"request-{key}"),
        attempt=own.pop("attempt", 0),
        engine_id="engine",
        prompt_ids=pack_ids(prompt),
        prior_ids=pack_ids(prior),
        seed=0,
        params=SamplingParams(**fields),
        hashes=own.pop("hashes", b""),
        **own,
    )


def expected_answer(prompt: Sequence[int], n: int) -> list[int]:
    """The first `n` tokens that the worker model generates after `prompt`, whatever they are."""
    ids = list(prompt)
    digest = digests_of(ids)[-1]
    for _ in range(n):
        ids.append(next_token(digest))
        digest = hash((digest, ids[-1]))
    return ids[len(prompt) :]


@dataclass
class Seen:
    """What one key was told."""

    ids: list[int] = field(default_factory=list)
    ended: tuple[str, int | None] | None = None
    started: list[int] = field(default_factory=list)
    error: str | None = None
    logprob_ids: list[int] = field(default_factory=list)
    prompt_positions: list[int] = field(default_factory=list)
    pooled: list[list[int]] = field(default_factory=list)


class Ledger:
    """What each request was told, by owner and key."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, int], Seen] = {}

    def note(self, frames: dict[str, Tokens]) -> None:
        for owner, tokens in frames.items():
            self.note_frame(owner, tokens)

    def note_frame(self, owner: str, tokens: Tokens) -> None:
        def seen(key: int) -> Seen:
            return self.seen[owner, key]

        keys, ids = unpack_ids(tokens.keys), unpack_ids(tokens.ids)
        assert unpack_ids(tokens.counts) == [1] * len(keys)
        for key, token in zip(keys, ids, strict=True):
            assert seen(key).ended is None
            seen(key).ids.append(token)
        for start in tokens.started:
            assert start.queue_s >= 0 <= start.prefill_s
            seen(start.key).started.append(start.cached_tokens)
        for ended in tokens.ended:
            assert seen(ended.key).ended is None
            seen(ended.key).ended = (ended.finish_reason, ended.stop_reason)
        for key, error in tokens.failed:
            seen(key).error = error.code
        for key, vector in tokens.pooled:
            seen(key).pooled.append(unpack_ids(vector))
        for row in tokens.logprobs:
            seen(row.key).logprob_ids += unpack_ids(row.ids)
        for rows in tokens.prompt_logprobs:
            n = len(unpack_ids(rows.ranks))
            assert unpack_ids(rows.ranks) == list(range(rows.start, rows.start + n))
            seen(rows.key).prompt_positions += unpack_ids(rows.ranks)


class Driver(Ledger):
    """One engine over one worker model, stepped by hand. A `worker` that served another engine is
    taken over with what its pages hold."""

    def __init__(
        self,
        *,
        card: ModelCard | None = None,
        capacity: Capacity | None = None,
        prefix_caching: bool = True,
        worker: WorkerModel | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.card = card or make_card()
        self.capacity = capacity or make_capacity()
        self.settings = SchedulerSettings(**settings)
        self.worker = worker or WorkerModel(self.card, self.capacity)
        self.engine = Engine(
            "engine",
            self.card,
            self.capacity,
            self.settings,
            epoch=EPOCH,
            prefix_caching=prefix_caching,
            cached=self.worker.change_hands(),
        )
        self.pending: deque[StepResult | NeedSnapshot] = deque()
        self.steps: list[Step] = []

    def submit(self, submit: Submit, owner: str = OWNER) -> Seen:
        self.engine.submit(owner, submit, 0.0)
        return self.seen.setdefault((owner, submit.key), Seen())

    def plan(self, **faults: Sequence[int]) -> Step | None:
        """Plan one step and let the worker run it; its result waits to land."""
        step = self.engine.plan(0.0)
        if step is not None:
            self.steps.append(step)
            self.pending.append(self.worker.execute(step, **faults))
        return step

    def rows(self, step: Step) -> list[tuple[int, int]]:
        """(slot, tokens) of each row of a step that the worker ran."""
        return self.worker.batches[step.step]

    def land(self) -> bool:
        """Take in the oldest result. False when there is none."""
        if not self.pending:
            return False
        result = self.pending.popleft()
        if isinstance(result, NeedSnapshot):
            self.engine.snapshot(result.last_step)
        else:
            self.note(self.engine.apply(result, 0.0))
        return True

    def step(self, **faults: Sequence[int]) -> Step:
        """One step, landed at once."""
        step = self.plan(**faults)
        assert step is not None
        while self.land():
            pass
        return step

    def run(self, limit: int = 10_000) -> None:
        """Until nothing is left to do, as far ahead as the depth allows."""
        for _ in range(limit):
            while self.plan() is not None:
                pass
            if not self.land():
                assert self.engine.idle
                return
        raise AssertionError(f"not idle after {limit} steps")

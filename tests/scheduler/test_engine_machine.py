"""The engine against a worker that forgives nothing, under everything that can happen at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_helpers import (
    Driver,
    Seen,
    expected_answer,
    make_capacity,
    make_card,
    make_submit,
)
from worker_model import EOS, SALTS, VOCAB

from pagemesh.scheduler_svc import borrowing
from pagemesh.scheduler_svc.request import Request, Status
from pagemesh.shared.engine_messages import Submit
from pagemesh.shared.errors import RequestError
from pagemesh.shared.pooling import Pooling, PoolingParams
from pagemesh.shared.wire import pack_ids, unpack_ids

OWNERS = ("tokenizer-1", "tokenizer-2")
PROMPTS = st.lists(st.sampled_from([3, 4]), min_size=1, max_size=14)
Key = tuple[str, int]


@dataclass
class Sent:
    """A request as sent, what must come of it, and what came."""

    submit: Submit
    answer: list[int]
    stop: tuple[str, int | None]
    seen: Seen


def oracle(submit: Submit, max_length: int) -> tuple[list[int], tuple[str, int | None]]:
    """The whole answer (prior ids included) and its end, by the plain reading of the parameters."""
    params = submit.params
    prompt = unpack_ids(submit.prompt_ids)
    room = max_length - len(prompt)
    limit = room if params.max_tokens is None else params.max_tokens
    answer = expected_answer(prompt, limit)
    for n, token in enumerate(answer, start=1):
        if n <= params.min_tokens:
            continue
        if token == EOS and not params.ignore_eos:
            return answer[:n], ("stop", None)
        if token in params.stop_token_ids:
            return answer[:n], ("stop", token)
    return answer, ("length", None)


def pooled_ids(submit: Submit) -> list[list[int]]:
    """What goes into the vector of a prompt that is pooled, once."""
    prompt = unpack_ids(submit.prompt_ids)
    if submit.pooling is None:
        return []
    return [prompt if submit.pooling.reads_all else prompt[-1:]]


class EngineMachine(RuleBasedStateMachine):
    """Rules are what clients, the network and the worker may do; `Driver` and `WorkerModel` check
    each frame, the invariants check the books."""

    @initialize(
        num_blocks=st.integers(4, 20),
        block_tokens=st.integers(1, 4),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 12),
        depth=st.integers(1, 3),
        policy=st.sampled_from(["fcfs", "priority"]),
        watermark=st.sampled_from([0.0, 0.2]),
        prefix_caching=st.booleans(),
        worth_waiting=st.sampled_from([1, 64]),
    )
    def start(
        self,
        num_blocks: int,
        block_tokens: int,
        max_num_seqs: int,
        budget: int,
        depth: int,
        policy: str,
        watermark: float,
        prefix_caching: bool,
        worth_waiting: int,
    ) -> None:
        # Prompts are short here.
        self.patched = patch.object(borrowing, "_WORTH_WAITING_TOKENS", worth_waiting)
        self.patched.start()
        self.pool_tokens = (num_blocks - 1) * block_tokens
        self.sent: dict[Key, Sent] = {}
        self.keys = 0
        self.depth = depth
        self.build = lambda worker=None: Driver(
            worker=worker,
            card=make_card(max_model_len=24, block_tokens=block_tokens),
            capacity=make_capacity(num_blocks=num_blocks, max_num_seqs=max_num_seqs, budget=budget),
            prefix_caching=prefix_caching,
            run_ahead_depth=depth,
            scheduling_policy=policy,
            watermark=watermark,
        )
        self.driver = self.build()

    # -- clients -----------------------------------------------------------------------------------

    @rule(
        owner=st.sampled_from(OWNERS),
        prompt=PROMPTS,
        max_tokens=st.none() | st.integers(0, 10),
        min_tokens=st.integers(0, 3),
        ignore_eos=st.booleans(),
        stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=3),
        n=st.integers(1, 3),
        priority=st.integers(0, 2),
        salt=st.sampled_from(SALTS),
        scored=st.booleans(),
        logprobs=st.booleans(),
        pooling=st.sampled_from([None, None, "mean", "last"]),
    )
    def submit(
        self,
        owner: str,
        prompt: list[int],
        max_tokens: int | None,
        min_tokens: int,
        ignore_eos: bool,
        stop_token_ids: list[int],
        n: int,
        priority: int,
        salt: str,
        scored: bool,
        logprobs: bool,
        pooling: Pooling | None,
    ) -> None:
        if pooling is not None:
            n, max_tokens, scored, logprobs = 1, 0, False, False
        self.keys += n
        for choice in range(n):
            submit = make_submit(
                self.keys - n + choice,
                prompt,
                max_tokens=max_tokens,
                min_tokens=min_tokens if max_tokens is None else min(min_tokens, max_tokens),
                ignore_eos=ignore_eos,
                stop_token_ids=stop_token_ids,
                priority=priority,
                cache_salt=salt,
                prompt_logprobs=0 if scored and choice == 0 else None,
                logprobs=0 if logprobs else None,
                group=f"group-{self.keys}" if n > 1 else "",
                choice=choice,
                pooling=PoolingParams(pooling=pooling) if pooling else None,
            )
            self.send(owner, submit)

    def send(self, owner: str, submit: Submit) -> None:
        n_prompt = len(unpack_ids(submit.prompt_ids))
        wanted = 1 if submit.params.max_tokens is None else submit.params.max_tokens
        room = min(24, self.pool_tokens)
        if n_prompt + wanted > room:
            with pytest.raises(RequestError) as caught:
                self.driver.submit(submit, owner)
            assert caught.value.status == 400
            return
        seen = self.driver.submit(submit, owner)
        answer, stop = oracle(submit, room)
        self.sent[owner, submit.key] = Sent(submit, answer, stop, seen)

    def live(self) -> list[Key]:
        return [k for k, sent in self.sent.items() if not (sent.seen.ended or sent.seen.error)]

    @precondition(lambda self: self.live())
    @rule(pick=st.integers(0), reason=st.sampled_from(["stop", "abort"]))
    def end(self, pick: int, reason: str) -> None:
        owner, key = self.live()[pick % len(self.live())]
        self.driver.engine.end(owner, [key, 10_000], reason, 0.0)
        self.forget([(owner, key)])

    @rule(owner=st.sampled_from(OWNERS))
    def drop_owner(self, owner: str) -> None:
        gone = [key for key in self.live() if key[0] == owner]
        assert self.driver.engine.drop_owner(owner) == len(gone)
        self.forget(gone)

    def forget(self, keys: Sequence[Key]) -> None:
        """Nothing more may be said about these: the driver fails on a key it does not know."""
        for key in keys:
            del self.sent[key], self.driver.seen[key]

    # -- steps -------------------------------------------------------------------------------------

    @rule(
        nonfinite=st.lists(st.integers(0, 7), max_size=1),
        failed=st.lists(st.integers(0, 7), max_size=1),
    )
    def plan_with_faults(self, nonfinite: list[int], failed: list[int]) -> None:
        self.plan(nonfinite=nonfinite, failed=failed)

    @rule()
    def plan(self, **faults: list[int]) -> None:
        had_result_to_wait_for = bool(self.driver.pending)
        step = self.driver.plan(**faults)
        if step is None and not had_result_to_wait_for:
            assert not self.live(), "requests wait, nothing is in flight, and nothing is planned"

    @rule()
    def plan_again(self) -> None:
        self.plan()

    @rule()
    def land(self) -> None:
        if self.driver.land():
            self.check_answers()

    @rule()
    def lose_step(self) -> None:
        """A step that never reaches the worker. The next one will not follow; with no next one,
        the worker finds out by itself."""
        step = self.driver.engine.plan(0.0)
        if step is None:
            return
        if step.base == 0:
            # There is nothing yet that a later step could fail to follow.
            self.driver.pending.append(self.driver.worker.execute(step))
        elif self.driver.plan() is None:
            self.driver.pending.append(self.driver.worker.notice_gap())

    @rule()
    def lose_worker(self) -> None:
        self.move(self.build())

    @rule()
    def lose_scheduler(self) -> None:
        """Another one takes the worker over, with what its pages hold. Results on their way go to
        nobody."""
        self.move(self.build(self.driver.worker))

    def move(self, driver: Driver) -> None:
        """Every request goes to a new engine with what it was told so far."""
        lost = {(o, key) for o, keys in self.driver.engine.lost().items() for key in keys}
        assert lost == set(self.live())
        seen = self.driver.seen
        self.driver = driver
        for key in sorted(lost):
            sent = self.sent.pop(key)
            told = unpack_ids(sent.submit.prior_ids) + seen[key].ids
            again = sent.submit._replace(key=self.keys, prior_ids=pack_ids(told), attempt=1)
            self.keys += 1
            self.send(key[0], again)

    @rule()
    def fail_all(self) -> None:
        self.driver.note(self.driver.engine.fail_all("injected"))
        assert not self.live()
        assert all(s.seen.ended or s.seen.error for s in self.sent.values())

    def check_answers(self) -> None:
        for key, sent in self.sent.items():
            told = unpack_ids(sent.submit.prior_ids) + sent.seen.ids
            assert told == sent.answer[: len(told)], f"{key} was told other tokens"
            if sent.submit.params.logprobs is not None:
                assert sent.seen.logprob_ids == sent.seen.ids
            if sent.seen.ended:
                assert told == sent.answer
                assert sent.seen.ended == sent.stop
                assert sent.seen.pooled == pooled_ids(sent.submit)
                if sent.submit.params.prompt_logprobs is not None:
                    n_prompt = len(unpack_ids(sent.submit.prompt_ids))
                    assert sent.seen.prompt_positions == list(range(1, n_prompt))

    # -- books -------------------------------------------------------------------------------------

    @invariant()
    def books_are_sound(self) -> None:
        assert self.driver.engine.audit() == []
        assert len(self.driver.engine._inflight) <= self.depth

    @invariant()
    def counters_are_sound(self) -> None:
        engine = self.driver.engine
        for client in engine._clients.values():
            for request in client.requests.values():
                check_counters(request, self.driver.card.block_tokens)

    @invariant()
    def decode_order_is_sound(self) -> None:
        """Whoever runs is in the order or off it, and the worker has the same order."""
        residents = self.driver.engine._residents
        on = {r.slot: r for r in residents.decoding if r.status is Status.RUNNING}
        assert not on.keys() & residents.off_order.keys()
        assert on | residents.off_order == residents.running
        worker, writer = self.driver.worker, self.driver.engine._writer
        if worker.in_step and worker.last_step == writer.step and not writer.snapshot_due:
            pairs = zip(residents.decoding, worker.decoding, strict=True)
            assert all(request.slot == slot for request, slot in pairs if request.slot >= 0)

    @invariant()
    def stats_are_sound(self) -> None:
        stats = self.driver.engine.stats()
        assert stats.running + stats.waiting == len(self.live())
        if not stats.running:
            assert stats.kv_usage == 0

    def teardown(self) -> None:
        """Whatever happened, everyone is served within a bounded number of steps."""
        if not hasattr(self, "driver"):
            return
        self.patched.stop()
        known = sum(len(s.submit.prompt_ids) // 4 + len(s.answer) for s in self.sent.values())
        started = self.driver.worker.steps
        self.driver.run()
        self.check_answers()
        assert not self.live()
        # Each step computes a token; at most `known` are computed again for each one generated.
        assert self.driver.worker.steps - started <= (known + 3 * self.depth) * (known + 2)
        assert self.driver.engine.audit() == []
        assert not self.driver.worker.rows
        assert self.driver.engine.stats().kv_usage == 0


def check_counters(request: Request, block_tokens: int) -> None:
    assert request.owed >= 0
    assert request.published * block_tokens <= request.confirmed <= request.computed
    if request.status is Status.RUNNING:
        assert request.slot >= 0
        assert request.computed < request.length
        assert request.computed <= request.room_tokens == len(request.blocks) * block_tokens
    else:
        assert request.slot == -1
        assert not request.blocks
        assert request.computed == 0
        assert request.owed == 0


EngineMachine.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestEngineMachine = EngineMachine.TestCase

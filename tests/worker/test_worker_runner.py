"""The runner on a tiny decoder: what a request gets never depends on how it is scheduled."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from worker_harness import (
    BLOCK_TOKENS,
    EOS,
    GREEDY,
    VOCAB,
    Driver,
    alone,
    tiny_decoder,
    tiny_runner,
)

from pagemesh.kernels.inputs import AttentionInputs
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.wire import StepResult, pack_ids, unpack_ids
from pagemesh.worker_svc.kv_cache import KVCache
from pagemesh.worker_svc.models.decoder import Decoder
from pagemesh.worker_svc.runner import StepGap

RANDOM = SamplingParams(temperature=1.3)
PARAMS = [
    GREEDY,
    RANDOM,
    SamplingParams(temperature=0.9, top_p=0.8, top_k=20),
    SamplingParams(temperature=1.5, min_p=0.05, repetition_penalty=1.4),
    SamplingParams(temperature=0.7, frequency_penalty=0.8, presence_penalty=-0.4, logprobs=2),
    SamplingParams(temperature=1.1, min_tokens=6, logit_bias={EOS: 20.0, 40: -3.0}),
]
PROMPT = [11, 3, 60, 7, 7, 29, 80]


def steps(driver: Driver, slot: int, n: int) -> list[int]:
    """`n` tokens of a slot whose prompt is computed, one step each."""
    return [unpack_ids(driver.run({slot: 1}).sampled)[0] for _ in range(n)]


# -- one request, however it is scheduled ---------------------------------------------------------


def test_decoding_equals_computing_the_whole_sequence_again(decoder: Decoder) -> None:
    ids = list(PROMPT)
    for _ in range(12):
        ids += alone(decoder, ids, GREEDY, 1)
    assert ids[len(PROMPT) :] == alone(decoder, PROMPT, GREEDY, 12)


@pytest.mark.parametrize("chunks", [[1] * 7, [2, 5], [3, 3, 1], [4, 3], [6, 1]])
@pytest.mark.parametrize("params", PARAMS)
def test_chunked_prompts_give_the_same_tokens(
    decoder: Decoder, chunks: list[int], params: SamplingParams
) -> None:
    driver = Driver(tiny_runner(decoder, fill=math.nan))
    driver.enter(2, PROMPT, params, seed=4)
    results = [driver.run({2: n}) for n in chunks]
    assert [unpack_ids(result.sampled)[0] for result in results[:-1]] == [-1] * (len(chunks) - 1)
    first = unpack_ids(results[-1].sampled)[0]
    assert [first, *steps(driver, 2, 9)] == alone(decoder, PROMPT, params, 10, seed=4)


@pytest.mark.parametrize("params", PARAMS)
def test_a_resumed_request_goes_on_as_it_would_have(
    decoder: Decoder, params: SamplingParams
) -> None:
    """Prior tokens come back as known ids; penalties and min_tokens still count them as output."""
    whole = alone(decoder, PROMPT, params, 12, seed=-9)
    resumed = alone(decoder, PROMPT + whole[:5], params, 7, seed=-9, n_prompt=len(PROMPT))
    assert resumed == whole[5:]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_tokens_do_not_depend_on_the_batch(decoder: Decoder, data: st.DataObject) -> None:
    """Random arrivals, chunks, slots, skipped rows and preemptions, with results read a step late:
    every request gets what it gets alone."""
    draw = data.draw
    driver = Driver(tiny_runner(decoder, fill=math.nan))
    waiting = [
        Request(
            ids=draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14)),
            params=draw(st.sampled_from(PARAMS)),
            seed=draw(st.integers(-5, 5)),
        )
        for _ in range(draw(st.integers(1, 4)))
    ]
    requests, running = list(waiting), {}
    for _ in range(draw(st.integers(4, 14))):
        if waiting and draw(st.booleans()):
            slot = draw(st.sampled_from([slot for slot in range(8) if slot not in running]))
            running[slot] = waiting.pop()
            running[slot].enter(driver, slot)
        work = {
            slot: draw(st.integers(1, driver.left(slot)))
            for slot in running
            if draw(st.sampled_from([True, True, True, False]))
        }
        step = driver.plan(work)
        for slot, token in driver.sampled(step, driver.runner.execute(step)).items():
            running[slot].output.append(token)
        if running and draw(st.sampled_from([False, False, True])):
            slot = draw(st.sampled_from(sorted(running)))
            driver.leave(slot)
            waiting.append(running.pop(slot))
    for request in requests:
        n = len(request.output)
        assert request.output == alone(decoder, request.ids, request.params, n, seed=request.seed)


class Request:
    def __init__(self, ids: list[int], params: SamplingParams, seed: int) -> None:
        self.ids, self.params, self.seed = ids, params, seed
        self.output: list[int] = []

    def enter(self, driver: Driver, slot: int) -> None:
        known = self.ids + self.output
        driver.enter(slot, known, self.params, n_prompt=len(self.ids), seed=self.seed)


def test_running_ahead_needs_no_results(decoder: Decoder) -> None:
    """All steps are planned before the first one is executed."""
    driver = Driver(tiny_runner(decoder))
    driver.enter(0, PROMPT, PARAMS[3], seed=1)
    driver.enter(5, PROMPT[:3], PARAMS[4], seed=2)
    plan = [driver.plan({0: 7, 5: 3}), *(driver.plan({5: 1, 0: 1}) for _ in range(9))]
    results = [driver.sampled(step, driver.runner.execute(step)) for step in plan]
    assert [result[0] for result in results] == alone(decoder, PROMPT, PARAMS[3], 10, seed=1)
    assert [result[5] for result in results] == alone(decoder, PROMPT[:3], PARAMS[4], 10, seed=2)


def test_a_slot_left_and_taken_in_one_step(decoder: Decoder) -> None:
    """Nothing of the former request shows: parameters, penalties, bans, tokens, blocks."""
    driver = Driver(tiny_runner(decoder, max_num_seqs=1))
    driver.enter(0, PROMPT, PARAMS[5], seed=3)
    driver.run({0: 7})
    steps(driver, 0, 3)
    for params in (GREEDY, PARAMS[3], PARAMS[4]):
        driver.leave(0)
        driver.enter(0, PROMPT[2:], params, seed=8)
        first = unpack_ids(driver.run({0: 5}).sampled)
        assert first + steps(driver, 0, 6) == alone(decoder, PROMPT[2:], params, 7, seed=8)


def test_a_fork_shares_full_blocks_and_copies_the_last(decoder: Decoder) -> None:
    driver = Driver(tiny_runner(decoder))
    prompt = [*PROMPT, 50, 51, 52]
    driver.enter(0, prompt, RANDOM, seed=1)
    first = unpack_ids(driver.run({0: len(prompt)}).sampled)
    parent_blocks = driver.slots[0].blocks
    copy = driver.free.pop()
    driver.copies = [parent_blocks[2], copy]
    shared = [*parent_blocks[:2], copy]
    driver.enter(1, prompt, RANDOM, seed=2, shared=shared, computed=len(prompt) - 1)
    output: dict[int, list[int]] = {0: first, 1: []}
    for _ in range(8):
        step = driver.plan({0: 1, 1: 1})
        for slot, token in driver.sampled(step, driver.runner.execute(step)).items():
            output[slot].append(token)
    assert output[0] == alone(decoder, prompt, RANDOM, 9, seed=1)
    assert output[1] == alone(decoder, prompt, RANDOM, 8, seed=2)
    assert output[0][:8] != output[1]


def test_a_prefix_found_in_the_cache(decoder: Decoder) -> None:
    driver = Driver(tiny_runner(decoder))
    prompt = [*PROMPT, 50, 51, 52]
    driver.enter(0, prompt)
    driver.run({0: len(prompt)})
    kept = driver.leave(0, keep_blocks=True)
    driver.enter(3, prompt, shared=kept[:2], computed=2 * BLOCK_TOKENS)
    first = unpack_ids(driver.run({3: 2}).sampled)
    assert first + steps(driver, 3, 5) == alone(decoder, prompt, GREEDY, 6)


def test_a_step_without_rows_runs_no_model(decoder: Decoder) -> None:
    model = Faulty(decoder, lambda _: True)
    driver = Driver(tiny_runner(model))
    driver.enter(0, PROMPT)
    assert driver.run({}) == StepResult(1, 1, b"", elapsed_s=pytest.approx(0, abs=1))
    assert driver.runner.live_rows == 1
    driver.leave(0)
    driver.run({})
    assert driver.runner.live_rows == 0


# -- parameters -----------------------------------------------------------------------------------


def test_min_tokens_hold_back_eos_and_stop_ids(decoder: Decoder) -> None:
    pushed = {EOS: 100.0, 8: 99.0}
    params = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=[8], logit_bias=pushed)
    tokens = alone(decoder, PROMPT, params, 5)
    assert not {EOS, 8} & set(tokens[:3])
    assert tokens[3:] == [EOS, EOS]


def test_repetition_penalty_counts_the_prompt_and_the_others_do_not(decoder: Decoder) -> None:
    bias = {token: 60.0 + token / 10 for token in PROMPT}
    strongest = max(PROMPT)
    free = SamplingParams(temperature=0.0, logit_bias=bias)
    assert alone(decoder, PROMPT, free, 1) == [strongest]
    frequency = SamplingParams(temperature=0.0, logit_bias=bias, frequency_penalty=2.0)
    assert alone(decoder, PROMPT, frequency, 1) == [strongest]
    presence = SamplingParams(temperature=0.0, logit_bias=bias, presence_penalty=2.0)
    assert alone(decoder, PROMPT, presence, 1) == [strongest]
    repetition = SamplingParams(temperature=0.0, logit_bias=bias, repetition_penalty=1e6)
    assert not set(alone(decoder, PROMPT, repetition, 1)) & set(PROMPT)


def test_penalties_grow_with_the_output(decoder: Decoder) -> None:
    """Three equally pushed tokens take turns, since each choice costs its token two points."""
    bias = dict.fromkeys((20, 21, 22), 95.0)
    params = SamplingParams(temperature=0.0, logit_bias=bias, frequency_penalty=2.0)
    tokens = alone(decoder, PROMPT, params, 45)
    counts = [tokens.count(token) for token in (20, 21, 22)]
    assert sum(counts) == 45
    assert all(count > 5 for count in counts)


def test_more_penalised_rows_than_the_first_pool_holds(decoder: Decoder) -> None:
    driver = Driver(tiny_runner(decoder))
    for slot in range(8):
        driver.enter(slot, PROMPT, PARAMS[3 + slot % 2], seed=slot)
    plan = [driver.plan(dict.fromkeys(range(8), n)) for n in (7, 1, 1, 1)]
    rows = [driver.sampled(step, driver.runner.execute(step)) for step in plan]
    for slot in range(8):
        expected = alone(decoder, PROMPT, PARAMS[3 + slot % 2], 4, seed=slot)
        assert [row[slot] for row in rows] == expected


# -- logprobs -------------------------------------------------------------------------------------


def log_softmax_of(decoder: Decoder, ids: list[int]) -> Tensor:
    """float32[len(ids), V]: by the decoder alone, the whole sequence at once."""
    n, config = len(ids), decoder.config
    n_blocks = -(-n // BLOCK_TOKENS)
    kv = KVCache(2, n_blocks + 1, BLOCK_TOKENS, 2, config.head_dim, torch.float32, "cpu")
    inputs = AttentionInputs(
        query_start=torch.tensor([0, n], dtype=torch.int32),
        seq_lens=torch.tensor([n], dtype=torch.int32),
        block_tables=torch.arange(1, n_blocks + 1, dtype=torch.int32)[None],
        slot_mapping=torch.arange(BLOCK_TOKENS, BLOCK_TOKENS + n),
        max_query_tokens=n,
        max_seq_tokens=n,
        n_decode=0,
    )
    with torch.inference_mode():
        hidden = decoder(torch.tensor(ids), torch.arange(n), inputs, kv)
        return decoder.logits(hidden).log_softmax(dim=1)


def floats(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, "<f4").copy())


@pytest.mark.parametrize("params", [GREEDY, RANDOM, PARAMS[3]])
def test_logprobs_are_those_of_the_raw_model(decoder: Decoder, params: SamplingParams) -> None:
    """Whatever temperature, filters and penalties do to the choice."""
    fields = params.__struct_fields__
    params = SamplingParams(**{name: getattr(params, name) for name in fields} | {"logprobs": 3})
    driver = Driver(tiny_runner(decoder))
    driver.enter(1, PROMPT, params, seed=5)
    driver.enter(4, PROMPT[:2], SamplingParams(temperature=0.0, logprobs=0))
    driver.enter(6, PROMPT, RANDOM)
    step = driver.plan({1: 7, 4: 2, 6: 7})
    result = driver.runner.execute(step)
    assert [row.key for row in result.logprobs] == [0, 1]
    for row, prompt, width in zip(result.logprobs, (PROMPT, PROMPT[:2]), (4, 1), strict=True):
        expected = log_softmax_of(decoder, prompt)[-1]
        ids = unpack_ids(row.ids)
        assert ids[0] == unpack_ids(result.sampled)[row.key]
        assert ids[1:] == expected.topk(width - 1).indices.tolist()
        torch.testing.assert_close(floats(row.values), expected[ids], atol=1e-4, rtol=1e-4)
        assert row.rank == 1 + int((expected > expected[ids[0]]).sum())


@pytest.mark.parametrize("chunks", [[9], [1] * 9, [4, 5], [2, 3, 4]])
@pytest.mark.parametrize("top", [0, 2])
def test_prompt_logprobs_across_chunks(decoder: Decoder, chunks: list[int], top: int) -> None:
    prompt = [*PROMPT, 2, 4]
    expected = log_softmax_of(decoder, prompt)
    driver = Driver(tiny_runner(decoder))
    driver.enter(0, [9, 9, 9], GREEDY)
    driver.run({0: 3})
    driver.enter(3, prompt, SamplingParams(temperature=0.0, prompt_logprobs=top))
    position = 1
    for n in chunks:
        for part in driver.run({0: 1, 3: n}).prompt_logprobs:
            ids = torch.tensor(unpack_ids(part.ids)).view(-1, part.width)
            values = floats(part.values).view(ids.shape)
            rows = expected[part.start - 1 : part.start - 1 + len(ids)]
            assert part.key == 1
            assert (part.start, part.width) == (position, 1 + top)
            assert ids[:, 0].tolist() == prompt[position : position + len(ids)]
            assert torch.equal(ids[:, 1:], rows.topk(top).indices)
            torch.testing.assert_close(values, rows.gather(1, ids), atol=1e-4, rtol=1e-4)
            better = (rows > rows.gather(1, ids[:, :1])).sum(dim=1)
            assert unpack_ids(part.ranks) == (better + 1).tolist()
            position += len(ids)
    assert position == len(prompt)


def test_a_resumed_request_scores_its_prompt_only(decoder: Decoder) -> None:
    driver = Driver(tiny_runner(decoder))
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    driver.enter(0, [*PROMPT, 1, 2], params, n_prompt=len(PROMPT))
    (part,) = driver.run({0: 9}).prompt_logprobs
    assert unpack_ids(part.ids) == PROMPT[1:]
    assert driver.run({0: 1}).prompt_logprobs == []


# -- failures -------------------------------------------------------------------------------------


class Faulty:
    """A model that fails when its input does, with an error of the caller's choice."""

    def __init__(
        self,
        decoder: Decoder,
        fails: Callable[[Tensor], bool],
        error: Exception | None = None,
    ) -> None:
        self._decoder, self._fails = decoder, fails
        self._error = error or ValueError("broken\nsecond line")
        self.batches: list[int] = []

    def forward(
        self, token_ids: Tensor, positions: Tensor, inputs: AttentionInputs, kv: KVCache
    ) -> Tensor:
        self.batches.append(len(inputs.seq_lens))
        if self._fails(token_ids):
            raise self._error
        return self._decoder(token_ids, positions, inputs, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._decoder.logits(hidden)


def test_a_row_that_cannot_be_computed_fails_alone(decoder: Decoder) -> None:
    driver = Driver(tiny_runner(Faulty(decoder, lambda ids: bool((ids == 77).any()))))
    for slot in range(5):
        driver.enter(slot, [*PROMPT, 77] if slot == 3 else PROMPT, PARAMS[4], seed=slot)
    step = driver.plan({slot: 8 if slot == 3 else 7 for slot in range(5)})
    result = driver.runner.execute(step)
    assert result.failed == [(3, "ValueError: broken")]
    sampled = driver.sampled(step, result)
    assert sorted(sampled) == [0, 1, 2, 4]
    driver.leave(3)
    step = driver.plan({0: 1, 1: 1, 2: 1, 4: 1})
    result = driver.runner.execute(step)
    for slot, token in driver.sampled(step, result).items():
        assert [sampled[slot], token] == alone(decoder, PROMPT, PARAMS[4], 2, seed=slot)


def test_a_failed_row_may_still_be_in_the_next_step(decoder: Decoder) -> None:
    """Steps planned before the failure was known run: their counts hold."""
    driver = Driver(tiny_runner(Faulty(decoder, lambda ids: bool((ids == 77).any()))))
    driver.enter(0, [*PROMPT, 77])
    driver.enter(1, PROMPT)
    plan = [driver.plan({0: 8, 1: 7}), driver.plan({0: 1, 1: 1}), driver.plan({0: 1, 1: 1})]
    results = [driver.runner.execute(step) for step in plan]
    assert [result.failed for result in results] == [[(0, "ValueError: broken")], [], []]
    mine = [driver.sampled(*pair)[1] for pair in zip(plan, results, strict=True)]
    assert mine == alone(decoder, PROMPT, GREEDY, 3)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_a_step_too_large_for_the_memory_passes_in_parts(
    decoder: Decoder, error: Exception
) -> None:
    model = Faulty(decoder, lambda ids: len(ids) > 14, error)
    driver = Driver(tiny_runner(model))
    for slot in range(4):
        driver.enter(slot, PROMPT, RANDOM, seed=slot)
    step = driver.plan(dict.fromkeys(range(4), 7))
    result = driver.runner.execute(step)
    assert result.failed == []
    assert model.batches == [4, 2, 2]
    for slot, token in driver.sampled(step, result).items():
        assert [token] == alone(decoder, PROMPT, RANDOM, 1, seed=slot)
    driver.enter(6, PROMPT * 3, RANDOM)
    assert driver.run({6: 21}).failed == [(0, "out of memory while computing this step")]


class Poisoned:
    """A model whose logits are `value` in one place for rows that end in token 77."""

    def __init__(self, decoder: Decoder, value: float) -> None:
        self._decoder, self._value = decoder, value

    def forward(
        self, token_ids: Tensor, positions: Tensor, inputs: AttentionInputs, kv: KVCache
    ) -> Tensor:
        hidden = self._decoder(token_ids, positions, inputs, kv)
        marks = (token_ids == 77).float().unsqueeze(1)
        return torch.cat((hidden, marks), dim=1)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self._decoder.logits(hidden[:, :-1])
        logits[hidden[:, -1] > 0, 13] = self._value
        return logits


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [*PARAMS, SamplingParams(temperature=0.0, prompt_logprobs=1)])
def test_nonfinite_logits_mark_their_row(
    decoder: Decoder, value: float, params: SamplingParams
) -> None:
    driver = Driver(tiny_runner(Poisoned(decoder, value)))
    for slot in range(3):
        driver.enter(slot, [*PROMPT, 77] if slot == 1 else PROMPT, params, seed=slot)
    step = driver.plan({0: 7, 1: 8, 2: 7})
    result = driver.runner.execute(step)
    assert result.nonfinite == [1]
    assert result.failed == []
    for row in (0, 2):
        expected = alone(decoder, PROMPT, params, 1, seed=row)
        assert unpack_ids(result.sampled)[row] == expected[0]
    for logprobs in (*result.logprobs, *result.prompt_logprobs):
        assert floats(logprobs.values).isfinite().all()


def test_nonfinite_in_the_midst_of_a_scored_prompt(decoder: Decoder) -> None:
    driver = Driver(tiny_runner(Poisoned(decoder, math.nan)))
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    driver.enter(0, [3, 77, 4, 5], params)
    assert driver.run({0: 4}).nonfinite == [0]


def test_nan_left_in_a_block_does_not_reach_its_next_owner(decoder: Decoder) -> None:
    driver = Driver(tiny_runner(decoder, num_blocks=4))
    runner = driver.runner
    driver.enter(0, PROMPT)
    driver.run({0: 7})
    for layer in (*runner._kv.k, *runner._kv.v):
        layer[1:] = math.nan
    driver.leave(0)
    driver.enter(1, PROMPT)
    first = unpack_ids(driver.run({1: 7}).sampled)
    assert first + steps(driver, 1, 4) == alone(decoder, PROMPT, GREEDY, 5)


# -- diffs ----------------------------------------------------------------------------------------


def test_a_gap_asks_for_a_snapshot_and_a_snapshot_mends_it(decoder: Decoder) -> None:
    driver = Driver(tiny_runner(decoder))
    driver.enter(0, PROMPT)
    tokens = unpack_ids(driver.run({0: 7}).sampled)
    driver.plan({0: 1})
    for _ in range(2):
        with pytest.raises(StepGap) as gap:
            driver.run({0: 1})
        assert (gap.value.epoch, gap.value.last_step) == (1, 1)
    driver.leave(0)
    driver.enter(4, PROMPT + tokens, n_prompt=len(PROMPT))
    step = driver.plan({4: 8})._replace(base=0, gone=b"")
    tokens += unpack_ids(driver.runner.execute(step).sampled)
    assert tokens + steps(driver, 4, 3) == alone(decoder, PROMPT, GREEDY, 5)


@pytest.mark.parametrize("change", [{"epoch": 2}, {"base": 3}, {"step": 9, "base": 1, "epoch": 0}])
def test_steps_of_another_line_are_not_executed(decoder: Decoder, change: dict[str, int]) -> None:
    driver = Driver(tiny_runner(decoder))
    driver.enter(0, PROMPT)
    driver.run({0: 7})
    with pytest.raises(StepGap):
        driver.runner.execute(driver.plan({0: 1})._replace(**change))


def test_nothing_is_executed_before_a_snapshot(decoder: Decoder) -> None:
    driver = Driver(tiny_runner(decoder), last_step=4)
    with pytest.raises(StepGap) as gap:
        driver.run({})
    assert gap.value.last_step == 0


def test_reset_forgets(decoder: Decoder) -> None:
    driver = Driver(tiny_runner(decoder))
    driver.enter(0, PROMPT)
    driver.run({0: 7})
    driver.runner.reset()
    assert driver.runner.live_rows == 0
    with pytest.raises(StepGap) as gap:
        driver.run({0: 1})
    assert gap.value.last_step == 0


@pytest.mark.parametrize(
    "damage",
    [
        {"slots": pack_ids([1])},
        {"slots": pack_ids([-1])},
        {"slots": pack_ids([99])},
        {"slots": pack_ids([0, 0]), "n_tokens": pack_ids([1, 1])},
        {"n_tokens": pack_ids([2])},
        {"n_tokens": pack_ids([0])},
        {"n_tokens": pack_ids([1, 1])},
        {"gone": pack_ids([3])},
        {"gone": pack_ids([-8])},
        {"cont": [(0, pack_ids([0]))]},
        {"cont": [(0, pack_ids([96]))]},
        {"cont": [(0, pack_ids([1] * 16))]},
        {"cont": [(5, pack_ids([1]))]},
        {"copies": pack_ids([1, 500])},
        {"slots": b"\0\0\0"},
    ],
    ids=str,
)
def test_a_step_that_contradicts_the_batch_fails_and_the_next_needs_a_snapshot(
    decoder: Decoder, damage: dict[str, object]
) -> None:
    driver = Driver(tiny_runner(decoder))
    driver.enter(0, PROMPT)
    driver.run({0: 7})
    step = driver.plan({0: 1})._replace(**damage)
    result = driver.runner.execute(step)
    assert [row for row, _ in result.failed] == list(range(len(step.slots) // 4))
    with pytest.raises(StepGap) as gap:
        driver.run({0: 1})
    assert gap.value.last_step == step.step
    driver.leave(0)
    driver.enter(0, PROMPT)
    healed = driver.runner.execute(driver.plan({0: 7})._replace(base=0, gone=b""))
    assert unpack_ids(healed.sampled) == alone(decoder, PROMPT, GREEDY, 1)


@pytest.mark.parametrize(
    ("slot", "n_ids", "computed"),
    [(0, 7, 0), (8, 7, 0), (-1, 7, 0), (1, 65, 0), (1, 7, 7), (1, 7, -1)],
)
def test_a_row_that_cannot_enter(decoder: Decoder, slot: int, n_ids: int, computed: int) -> None:
    driver = Driver(tiny_runner(decoder))
    driver.enter(0, PROMPT)
    driver.run({0: 7})
    driver.enter(slot, [1] * n_ids, computed=computed)
    step = driver.plan({})._replace(slots=pack_ids([slot]), n_tokens=pack_ids([1]))
    assert len(driver.runner.execute(step).failed) == 1


def test_a_prompt_of_the_longest_length_is_scored_beside_its_neighbour(decoder: Decoder) -> None:
    """It samples a token past the end, which must not land in the next slot."""
    driver = Driver(tiny_runner(decoder))
    longest = [1 + i % 90 for i in range(64)]
    params = SamplingParams(temperature=0.0, prompt_logprobs=0, max_tokens=0)
    driver.enter(1, PROMPT)
    driver.enter(0, longest, params)
    result = driver.run({0: 64, 1: 7})
    (part,) = result.prompt_logprobs
    assert unpack_ids(part.ids) == longest[1:]
    driver.leave(0)
    tokens = [unpack_ids(result.sampled)[1], *steps(driver, 1, 4)]
    assert tokens == alone(decoder, PROMPT, GREEDY, 5)


def test_a_full_row_cannot_be_computed_further(decoder: Decoder) -> None:
    driver = Driver(tiny_runner(decoder))
    driver.enter(0, [1] * 64)
    driver.run({0: 64})
    assert [row for row, _ in driver.run({0: 1}).failed] == [0]


def test_two_models_differ() -> None:
    """The tests above compare tokens of a decoder that says different things to different input."""
    first, second = tiny_decoder(0), tiny_decoder(1)
    assert alone(first, PROMPT, GREEDY, 6) != alone(second, PROMPT, GREEDY, 6)
    assert alone(first, PROMPT, GREEDY, 6) != alone(first, PROMPT[1:], GREEDY, 6)
    assert len(set(alone(first, PROMPT, RANDOM, 20))) > 5

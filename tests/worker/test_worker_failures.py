"""Rows that fail, logits that are not finite, steps that do not fit."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor
from worker_harness import (
    GREEDY,
    PARAMS,
    PROMPT,
    RANDOM,
    VOCAB,
    Driver,
    alone,
    floats,
    steps,
    tiny_runner,
)

from pagemesh.kernels.inputs import AttentionInputs
from pagemesh.shared.engine_messages import StepResult
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.wire import pack_ids, unpack_ids
from pagemesh.worker_svc import sampling_state
from pagemesh.worker_svc.kv_cache import KVCache
from pagemesh.worker_svc.models.decoder import Decoder
from pagemesh.worker_svc.runner import StepGap
from pagemesh.worker_svc.step_model import StepModel


class Faulty:
    """A model that fails when its input does, with an error of the caller's choice."""

    def __init__(
        self,
        decoder: StepModel,
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
        return self._decoder.forward(token_ids, positions, inputs, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._decoder.logits(hidden)


def test_a_step_without_rows_runs_no_model(decoder: Decoder) -> None:
    model = Faulty(decoder, lambda _: True)
    driver = Driver(tiny_runner(model))
    driver.enter(0, PROMPT)
    assert driver.run({})._replace(elapsed_s=0.0) == StepResult(1, 1, b"")
    assert driver.runner.live_rows == 1
    driver.leave(0)
    driver.run({})
    assert driver.runner.live_rows == 0
    assert model.batches == []


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


def test_log_lines_of_bad_rows_name_their_requests(decoder: Decoder) -> None:
    poisoned = Faulty(Poisoned(decoder, math.nan), lambda ids: bool((ids == 66).any()))
    driver = Driver(tiny_runner(poisoned))
    for slot, last in ((5, 1), (2, 66), (7, 77)):
        driver.enter(slot, [*PROMPT, last])
    with capture_logs() as lines:
        driver.run({5: 8, 2: 8, 7: 8})
    [failed] = [line for line in lines if line["event"] == "row_failed"]
    [nonfinite] = [line for line in lines if line["event"] == "nonfinite_logits"]
    assert failed["request_id"] == "request-2"
    assert nonfinite["requests"] == ["request-3"]


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
    driver.enter(6, PROMPT * 3, RANDOM, seed=6)
    step = driver.plan({6: 21})
    result = driver.runner.execute(step)
    assert model.batches == [4, 2, 2, 1, 1, 1]  # one prompt, by tokens
    assert driver.sampled(step, result) == {6: alone(decoder, PROMPT * 3, RANDOM, 1, seed=6)[0]}


def test_a_row_that_never_fits_the_memory_fails_alone(decoder: Decoder) -> None:
    model = Faulty(decoder, lambda ids: bool((ids == 77).any()), MemoryError())
    driver = Driver(tiny_runner(model))
    driver.enter(0, PROMPT)
    driver.enter(1, [*PROMPT, 77])
    step = driver.plan({0: 7, 1: 8})
    result = driver.runner.execute(step)
    assert result.failed == [(1, "out of memory while computing this step")]
    assert driver.sampled(step, result)[0] == alone(decoder, PROMPT, GREEDY, 1)[0]


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
    for layer in (*runner._executor._kv.k, *runner._executor._kv.v):
        layer[1:] = math.nan
    driver.leave(0)
    driver.enter(1, PROMPT)
    first = unpack_ids(driver.run({1: 7}).sampled)
    assert first + steps(driver, 1, 4) == alone(decoder, PROMPT, GREEDY, 5)


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
        {"joined": pack_ids([1])},
        {"joined": pack_ids([-1])},
        {"joined": pack_ids([99])},
        {"joined": pack_ids([0, 0]), "n_rows": 2, "n_tokens": 2},
        {"joined": b"", "chunks": pack_ids([0, 2]), "n_tokens": 2},
        {"joined": b"", "chunks": pack_ids([0, 0]), "n_tokens": 0},
        {"chunks": pack_ids([0, 1]), "n_rows": 2, "n_tokens": 2},
        {"chunks": pack_ids([0]), "n_rows": 2},
        {"n_rows": 2},
        {"n_tokens": 2},
        {"gone": pack_ids([3])},
        {"gone": pack_ids([-8])},
        {"grown": pack_ids([0, 0])},
        {"grown": pack_ids([0, 96])},
        {"grown": pack_ids([0, 1, 0, 2])},
        {"grown": pack_ids([5, 1])},
        {"grown": pack_ids([-1, 1])},
        {"grown": pack_ids([0])},
        {"copies": pack_ids([1, 500])},
        {"joined": b"\0\0\0"},
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
    assert [row for row, _ in result.failed] == list(range(step.n_rows))
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
    step = driver.plan({})._replace(joined=pack_ids([slot]), n_rows=1, n_tokens=1)
    assert len(driver.runner.execute(step).failed) == 1


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31 - 1])
def test_a_token_outside_the_vocabulary_is_refused(decoder: Decoder, token: int) -> None:
    """Kernels look it up unchecked; the step is refused before any does."""
    driver = Driver(tiny_runner(decoder))
    driver.enter(0, [3, token, 5])
    result = driver.run({0: 3})
    ((row, reason),) = result.failed
    assert row == 0
    assert "vocabulary" in reason


def test_ids_that_are_no_tokens_are_not_banned_and_not_biased(decoder: Decoder) -> None:
    """A model may name an end of sequence that it has no logits for: the row beside is safe."""
    params = SamplingParams(
        temperature=0.0, min_tokens=9, stop_token_ids=[VOCAB + PROMPT[0]], logit_bias={VOCAB: 50.0}
    )
    plain = SamplingParams(temperature=0.0, min_tokens=9)
    driver = Driver(tiny_runner(decoder))
    driver.enter(0, PROMPT, params)
    driver.enter(1, PROMPT)
    tokens = unpack_ids(driver.run({0: 7, 1: 7}).sampled)
    assert tokens == [*alone(decoder, PROMPT, plain, 1), *alone(decoder, PROMPT, GREEDY, 1)]


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


def test_counts_that_cannot_grow_fail_nobody_later(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request whose entry found no memory is lost, and the rows it would have had are not used
    before they are there."""
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    driver = Driver(tiny_runner(decoder))
    driver.enter(0, PROMPT, params)
    with monkeypatch.context() as patched:
        patched.setattr(sampling_state, "_longer", _no_memory)
        assert len(driver.run({0: len(PROMPT)}).failed) == 1
    again = Driver(driver.runner, epoch=2)
    again.enter(0, PROMPT, params)
    tokens = [unpack_ids(again.run({0: n}).sampled)[0] for n in (len(PROMPT), 1, 1)]
    assert tokens == alone(decoder, PROMPT, params, 3)


def _no_memory(*_: object) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")

"""The GPU's executor beside the CPU's: random schedules, and steps that fail in the middle."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from host_device import EOS, MAX_NUM_SEQS, MAX_STEP_TOKENS, VOCAB, act_out, new_driver
from worker_harness import GREEDY, PROMPT, Driver, floats

from pagemesh.shared.engine_messages import Step
from pagemesh.shared.pooling import Pooling, PoolingParams
from pagemesh.shared.sampling import SamplingParams, ThinkingBudget
from pagemesh.shared.structured_outputs import StructuredOutputsParams
from pagemesh.shared.wire import unpack_ids
from pagemesh.worker_svc.gpu.decoder import GPUDecoder
from pagemesh.worker_svc.gpu.executor import GPUExecutor
from pagemesh.worker_svc.gpu.sampler import GPUSampler
from pagemesh.worker_svc.landing import Landing

ON_CARD = torch.cuda.is_available()
PARAMS = [
    SamplingParams(temperature=1.3),
    SamplingParams(temperature=0.9, top_p=0.8, top_k=20),
    SamplingParams(temperature=1.5, min_p=0.05, repetition_penalty=1.4),
    SamplingParams(temperature=0.7, frequency_penalty=0.8, presence_penalty=-0.4, logprobs=2),
    SamplingParams(temperature=1.1, min_tokens=6, logit_bias={EOS: 20.0, 40: -3.0}),
    SamplingParams(temperature=0.0, prompt_logprobs=3, logprobs=4),
    SamplingParams(
        temperature=1.2, structured_outputs=StructuredOutputsParams(regex="([0-9][A-Z]+)+")
    ),
    SamplingParams(
        temperature=0.9,
        top_p=0.9,
        repetition_penalty=1.2,
        logprobs=2,
        min_tokens=3,
        structured_outputs=StructuredOutputsParams(choice=["[1,2]", "YES"]),
    ),
    SamplingParams(
        temperature=1.4,
        allowed_token_ids=[EOS, 9, 17, 33, 64],
        bad_word_ids=[[33], [9, 17], [17, 64, 9]],
        logprobs=1,
        logprob_token_ids=[9, 96],
    ),
    SamplingParams(temperature=1.1, thinking=ThinkingBudget(4, [], [40, 41]), min_tokens=9),
]
PENALISED = SamplingParams(temperature=0.0, frequency_penalty=1.0)
LONGEST = 60


@pytest.fixture
def acted(monkeypatch: pytest.MonkeyPatch, device: str) -> str:
    """The device to make executors for, which is acted out where there is none."""
    act_out(monkeypatch, device)
    return device


@dataclass
class Asked:
    """A request, and what it got."""

    ids: list[int]
    params: SamplingParams
    seed: int
    tokens: list[int] = field(default_factory=list)

    def expected(self) -> list[int]:
        """As many tokens, of a CPU that has nothing else to do."""
        driver = new_driver("cpu", cpu=True)
        driver.enter(0, self.ids, self.params, seed=self.seed)
        return [one(driver, driver.left(0)) for _ in self.tokens]


def one(driver: Driver, n_tokens: int = 1, slot: int = 0) -> int:
    """The token of the one row of a step."""
    result = driver.run({slot: n_tokens})
    assert result.failed == []
    return unpack_ids(result.sampled)[0]


class Crowd:
    """Requests that come and go at random, now and then; steps are launched before others have
    landed."""

    def __init__(self, driver: Driver, seed: int) -> None:
        self.driver = driver
        self.asked: list[Asked] = []
        self._rng = random.Random(seed)
        self._here: dict[int, Asked] = {}
        self._out: deque[tuple[Step, dict[int, Asked], Landing]] = deque()

    def step(self) -> None:
        if self._rng.random() < 0.25 or not self._here:
            self._leave()
            self._enter()
        step = self.driver.plan(self._work())
        self._out.append((step, dict(self._here), self.driver.runner.launch(step)))
        self.land(self._rng.randrange(4))

    def land(self, left: int = 0) -> None:
        """All but `left` of the steps that are out."""
        while len(self._out) > left:
            step, of, landing = self._out.popleft()
            result = landing.result()
            assert result.failed == []
            assert result.nonfinite == []
            for slot, token in self.driver.sampled(step, result).items():
                of[slot].tokens.append(token)

    def _leave(self) -> None:
        for slot in list(self._here):
            if self._rng.random() < 0.3 or self.driver.slots[slot].known >= LONGEST:
                self.driver.leave(slot)
                del self._here[slot]

    def _enter(self) -> None:
        for slot in range(MAX_NUM_SEQS):
            if slot not in self._here and self._rng.random() < 0.5:
                ids = [self._rng.randrange(VOCAB) for _ in range(self._rng.randrange(1, 30))]
                params = self._rng.choice([GREEDY, self._rng.choice(PARAMS)])
                asked = self._here[slot] = Asked(ids, params, self._rng.randrange(99))
                self.asked.append(asked)
                self.driver.enter(slot, ids, params, seed=asked.seed)

    def _work(self) -> dict[int, int]:
        """Prompts come in chunks; sometimes some rest."""
        work, budget, rest = {}, MAX_STEP_TOKENS, self._rng.choice([0.0, 0.0, 0.3])
        for slot in self._here:
            if self.driver.slots[slot].known >= LONGEST:
                continue
            n_tokens = self._rng.randint(self.driver.left(slot) // 2 + 1, self.driver.left(slot))
            if self._rng.random() >= rest and n_tokens <= budget:
                work[slot] = n_tokens
                budget -= n_tokens
        return work


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("seed", range(10 if ON_CARD else 1))
def test_a_crowd_gets_what_each_would_get_alone(acted: str, seed: int, eager: bool) -> None:
    crowd = Crowd(new_driver(acted, eager=eager), seed)
    for _ in range(100 if ON_CARD else 24):
        crowd.step()
    crowd.land()
    assert sum(len(asked.tokens) for asked in crowd.asked) > 40
    for asked in crowd.asked:
        assert asked.tokens == asked.expected()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (GPUDecoder, "forward"),
        (GPUSampler, "__call__"),
        (GPUSampler, "score"),
        (GPUExecutor, "_fetch"),
    ],
)
def test_a_crowd_on_a_device_that_is_short_of_memory(
    acted: str, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    """Every third call fails, while there are rows to try apart; nobody's tokens change."""
    crowd = Crowd(new_driver(acted, eager=True), 5)
    short_of_memory(monkeypatch, crowd.driver, owner, name, every=3)
    for _ in range(60 if ON_CARD else 12):
        crowd.step()
    crowd.land()
    for asked in crowd.asked:
        assert asked.tokens == asked.expected()


def short_of_memory(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, owner: type, name: str, every: int
) -> None:
    """Calls fail while they are for more than one row and token."""
    whole, compute = getattr(owner, name), GPUExecutor.compute
    calls = splittable = 0

    def noted(self: GPUExecutor, rows: Any) -> Any:
        nonlocal splittable
        splittable = int(rows.n_tokens.sum()) > 1
        return compute(self, rows)

    def fails(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal calls
        if splittable:
            calls += 1
            if calls % every == 0:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(self, *args, **options)

    monkeypatch.setattr(GPUExecutor, "compute", noted)
    monkeypatch.setattr(owner, name, fails)


def failing_once(whole: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    errors = [error]

    def fails(*args: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return whole(*args, **options)

    return fails


def test_rows_moved_on_by_a_step_with_a_prompt_are_brought_again(acted: str) -> None:
    driver, asked = new_driver(acted), Asked(PROMPT, PARAMS[0], 3)
    driver.enter(0, asked.ids, asked.params, seed=asked.seed)
    asked.tokens += [one(driver, len(PROMPT)), one(driver), one(driver)]
    driver.enter(1, PROMPT)
    step = driver.plan({0: 1, 1: 5})
    asked.tokens.append(driver.sampled(step, driver.runner.execute(step))[0])
    driver.leave(1)
    asked.tokens += [one(driver), one(driver)]
    assert asked.tokens == asked.expected()


def test_what_a_failed_row_leaves_does_not_reach_the_next_in_its_slot(
    acted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = new_driver(acted, eager=True)  # a graph would not call what fails here
    forward = failing_once(GPUDecoder.forward, ValueError("a bug"))
    monkeypatch.setattr(GPUDecoder, "forward", forward)
    driver.enter(0, PROMPT)
    assert len(driver.run({0: len(PROMPT)}).failed) == 1
    driver.leave(0)
    asked = Asked(PROMPT * 3, GREEDY, 0)
    driver.enter(0, asked.ids)
    asked.tokens += [one(driver, len(asked.ids)), one(driver), one(driver)]
    assert asked.tokens == asked.expected()


def test_a_step_that_was_not_launched_leaves_no_rows_for_the_next(
    acted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another request enters the slot at the position that the failed one would have had next."""
    asked = Asked([*PROMPT, 4, 9], PARAMS[0], 3)
    driver = new_driver(acted)
    driver.enter(1, asked.ids)
    one(driver, len(asked.ids), slot=1)
    driver.enter(0, PROMPT)
    one(driver, len(PROMPT))
    graphs = driver.runner._executor.decodes[0].graphs
    error = RuntimeError("CUDA error: out of memory")
    monkeypatch.setattr(graphs, "replay", failing_once(graphs.replay, error))
    assert len(driver.run({0: 1}).failed) == 1
    driver.leave(0)
    blocks = driver.slots[1].blocks
    driver.enter(0, asked.ids, asked.params, seed=3, shared=blocks, computed=len(asked.ids) - 1)
    asked.tokens += [one(driver), one(driver)]
    assert asked.tokens == asked.expected()


@pytest.mark.parametrize(("owner", "name"), [(GPUSampler, "score"), (GPUExecutor, "_fetch")])
def test_tokens_of_a_step_that_is_tried_again_count_once(
    acted: str, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    driver = new_driver(acted)
    driver.enter(0, PROMPT, PENALISED)
    asked = Asked(PROMPT, PENALISED, 0, [one(driver, len(PROMPT))])
    error = torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(owner, name, failing_once(getattr(owner, name), error))
    driver.enter(1, PROMPT, SamplingParams(temperature=0.0, prompt_logprobs=1))
    result = driver.run({0: 1, 1: len(PROMPT)})
    assert result.failed == []
    asked.tokens += [unpack_ids(result.sampled)[0], *(one(driver) for _ in range(6))]
    assert int(driver.runner._executor._sampling.counts.output_counts.sum()) == len(asked.tokens)
    assert asked.tokens == asked.expected()


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_prompts_are_pooled_as_on_a_cpu(acted: str, pooling: Pooling) -> None:
    """In chunks beside a row that decodes; the last is a single token, as of a decoding row."""
    vectors = []
    for cpu in (False, True):
        driver = new_driver(acted if not cpu else "cpu", cpu=cpu)
        driver.enter(0, PROMPT)
        one(driver, len(PROMPT))
        driver.enter(1, PROMPT, pooling=PoolingParams(pooling=pooling, dimensions=8))
        work = ({0: 1, 1: 2}, {1: len(PROMPT) - 3, 0: 1}, {0: 1, 1: 1})
        *begun, last = [driver.run(each) for each in work]
        assert not any(result.pooled for result in begun)
        assert one(driver) >= 0
        [(row, vector)] = last.pooled
        assert row == 1
        vectors.append(floats(vector))
    torch.testing.assert_close(*vectors, rtol=1e-4, atol=1e-5)

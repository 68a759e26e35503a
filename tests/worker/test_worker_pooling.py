"""Prompts are pooled the same however their computation is cut, repeated or interrupted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from worker_harness import GREEDY, PROMPT, Driver, floats, tiny_decoder, tiny_runner

from pagemesh.shared.engine_messages import StepResult
from pagemesh.shared.pooling import PoolingParams
from pagemesh.worker_svc.cpu_executor import CPUExecutor
from pagemesh.worker_svc.models.decoder import Decoder

RAW_MEAN = PoolingParams(pooling="mean", normalize=False)
RAW_LAST = PoolingParams(pooling="last", normalize=False)


def vector(result: StepResult, row: int = 0) -> torch.Tensor:
    [pooled] = [pooled for pooled in result.pooled if pooled.key == row]
    return floats(pooled.vector)


def whole(decoder: Decoder, ids: list[int], pooling: PoolingParams) -> torch.Tensor:
    """In one step, with nothing beside it."""
    driver = Driver(tiny_runner(decoder))
    driver.enter(0, ids, pooling=pooling)
    return vector(driver.run({0: len(ids)}))


@pytest.mark.parametrize("pooling", [RAW_MEAN, RAW_LAST], ids=str)
@pytest.mark.parametrize("chunks", [[1] * 7, [2, 5], [6, 1]], ids=str)
def test_chunks_beside_others(decoder: Decoder, pooling: PoolingParams, chunks: list[int]) -> None:
    driver = Driver(tiny_runner(decoder))
    driver.enter(0, PROMPT)
    driver.run({0: len(PROMPT)})
    driver.enter(3, PROMPT, pooling=pooling)
    *begun, last = [driver.run({0: 1, 3: n}) for n in chunks]
    assert not any(result.pooled for result in begun)
    expected = whole(decoder, PROMPT, pooling)
    torch.testing.assert_close(vector(last, row=1), expected, rtol=1e-5, atol=1e-6)


def test_cut_then_scaled(decoder: Decoder) -> None:
    raw = whole(decoder, PROMPT, RAW_MEAN)[:5]
    cut = whole(decoder, PROMPT, PoolingParams(pooling="mean", dimensions=5))
    torch.testing.assert_close(cut, raw / raw.norm())


@pytest.mark.parametrize(("slot", "beside"), [(0, 1), (1, 0)], ids=["first", "second"])
def test_a_step_that_is_tried_again_adds_once(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, slot: int, beside: int
) -> None:
    """The first try of each chunk fails behind the pooling, and passes in halves."""
    sample, calls = CPUExecutor._sample, iter(range(100))

    def fails(self: CPUExecutor, *args: Any) -> Any:
        if next(calls) % 3 == 0:
            raise MemoryError("no memory")
        return sample(self, *args)

    monkeypatch.setattr(CPUExecutor, "_sample", fails)
    driver = Driver(tiny_runner(decoder))
    driver.enter(slot, PROMPT, pooling=RAW_MEAN)
    driver.enter(beside, PROMPT, GREEDY)
    driver.run({slot: 3})
    result = driver.run(dict(sorted({slot: 4, beside: len(PROMPT)}.items())))
    assert (result.failed, next(calls)) == ([], 3)
    monkeypatch.undo()
    torch.testing.assert_close(vector(result, row=slot), whole(decoder, PROMPT, RAW_MEAN))


def test_the_next_in_a_slot_begins_anew(decoder: Decoder) -> None:
    driver = Driver(tiny_runner(decoder))
    driver.enter(0, PROMPT, pooling=RAW_MEAN)
    driver.run({0: 4})
    driver.leave(0)
    driver.enter(0, PROMPT[::-1], pooling=RAW_MEAN)
    got = vector(driver.run({0: len(PROMPT)}))
    torch.testing.assert_close(got, whole(decoder, PROMPT[::-1], RAW_MEAN))


def test_a_mean_without_its_beginning_is_refused() -> None:
    driver = Driver(tiny_runner(tiny_decoder()))
    driver.enter(0, PROMPT)
    driver.run({0: len(PROMPT)})
    blocks = driver.leave(0, keep_blocks=True)
    driver.enter(0, PROMPT, pooling=RAW_MEAN, shared=blocks, computed=4)
    [(row, reason)] = driver.run({0: 3}).failed
    assert row == 0
    assert "begins at token 4" in reason

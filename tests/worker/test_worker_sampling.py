"""Sampling parameters and logprobs, through the runner."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from worker_harness import (
    BLOCK_TOKENS,
    EOS,
    GREEDY,
    PARAMS,
    PROMPT,
    RANDOM,
    Driver,
    alone,
    floats,
    tiny_runner,
)

from pagemesh.kernels.inputs import AttentionInputs
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.wire import unpack_ids
from pagemesh.worker_svc.kv_cache import KVCache
from pagemesh.worker_svc.models.decoder import Decoder


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
    repetition = SamplingParams(temperature=0.0, logit_bias=bias, repetition_penalty=1000)
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


def log_softmax_of(decoder: Decoder, ids: list[int]) -> Tensor:
    """float32[len(ids), V]: by the decoder alone, the whole sequence at once."""
    n, config = len(ids), decoder.config
    n_blocks = -(-n // BLOCK_TOKENS)
    kv = KVCache(config, n_blocks + 1, BLOCK_TOKENS, torch.float32, "cpu")
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

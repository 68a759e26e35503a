"""The runner on a card, beside the one on the CPU: the same tokens however a request is scheduled.

In float32, where both compute the same sums but for their order.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "worker"))
from worker_harness import GREEDY, PROMPT, Driver

from pagemesh.shared.messages import Capacity, ModelCard
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.wire import unpack_ids
from pagemesh.worker_svc.books import new_batch
from pagemesh.worker_svc.cpu_executor import CPUExecutor
from pagemesh.worker_svc.kv_cache import KVCache
from pagemesh.worker_svc.models.config import DecoderConfig
from pagemesh.worker_svc.models.decoder import Decoder
from pagemesh.worker_svc.runner import Runner

pytestmark = pytest.mark.gpu

VOCAB, BLOCK_TOKENS, EOS = 512, 16, 5
CONFIG = DecoderConfig.from_dict(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
)
PARAMS = [
    GREEDY,
    SamplingParams(temperature=1.3),
    SamplingParams(temperature=0.9, top_p=0.8, top_k=20),
    SamplingParams(temperature=1.5, min_p=0.05, repetition_penalty=1.4),
    SamplingParams(temperature=0.7, frequency_penalty=0.8, presence_penalty=-0.4, logprobs=2),
    SamplingParams(temperature=1.1, min_tokens=6, logit_bias={EOS: 20.0, 40: -3.0}),
    SamplingParams(temperature=0.0, prompt_logprobs=3, logprobs=4),
]
N = 20


def tiny_decoder(device: str) -> Decoder:
    decoder = Decoder(CONFIG, dtype=torch.float32, device="cpu")
    rng = torch.Generator().manual_seed(0)
    for weight in decoder.parameters():
        torch.nn.init.normal_(weight, std=0.2, generator=rng)
    return decoder.to(device)


def new_runner(device: str, *, graphs: bool = True, num_blocks: int = 96) -> Runner:
    kv = KVCache(CONFIG, num_blocks, BLOCK_TOKENS, torch.float32, device)
    for layer in (*kv.k, *kv.v):
        layer[1:] = torch.nan
    card = ModelCard(["tiny"], VOCAB, 256, BLOCK_TOKENS, "float32", [EOS], 1, "f", 0)
    capacity = Capacity(num_blocks, 8, 256, 512, device)
    batch, names = new_batch(card, capacity), {"vocab_tokens": VOCAB, "eos_token_ids": [EOS]}
    if device == "cpu":
        executor = CPUExecutor(tiny_decoder(device), kv, batch, **names)
        return Runner(executor, batch, card, capacity)
    from pagemesh.worker_svc.gpu.decoder import GPUDecoder
    from pagemesh.worker_svc.gpu.executor import GPUExecutor

    model = GPUDecoder(tiny_decoder(device), 256)
    on_card = GPUExecutor(model, kv, batch, **names, max_step_tokens=256, eager=not graphs)
    on_card.capture()
    return Runner(on_card, batch, card, capacity)


def driver_of(runner: Runner) -> Driver:
    return Driver(runner, block_tokens=BLOCK_TOKENS)


@pytest.fixture(scope="module")
def card_runner() -> Runner:
    torch.cuda.set_stream(torch.cuda.Stream())  # no graph is captured on the default one
    return new_runner("cuda")


@pytest.fixture(autouse=True)
def own_stream() -> None:
    torch.cuda.set_stream(torch.cuda.Stream())


def alone(params: SamplingParams, seed: int, device: str = "cpu") -> list[int]:
    driver = driver_of(new_runner(device))
    driver.enter(0, PROMPT, params, seed=seed)
    return [unpack_ids(driver.run({0: driver.left(0)}).sampled)[0] for _ in range(N)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [alone(params, seed) for seed, params in enumerate(PARAMS)]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_all_at_once(expected: list[list[int]], ahead: int, graphs: bool) -> None:
    """Every kind of sampling in one batch, with steps launched before others landed."""
    driver = driver_of(new_runner("cuda", graphs=graphs))
    for seed, params in enumerate(PARAMS):
        driver.enter(seed, PROMPT, params, seed=seed)
    plan = []
    for _ in range(N):
        plan.append(driver.plan({slot: driver.left(slot) for slot in driver.slots}))
    out: dict[int, list[int]] = {slot: [] for slot in driver.slots}
    landings = []
    for done, step in enumerate(plan):
        landings.append(driver.runner.launch(step))
        if done >= ahead - 1:
            land(driver, plan, landings, out)
    while landings:
        land(driver, plan, landings, out)
    assert [out[slot] for slot in range(len(PARAMS))] == expected


def land(driver: Driver, plan: list, landings: list, out: dict[int, list[int]]) -> None:
    result = landings.pop(0).result()
    assert result.failed == []
    assert result.nonfinite == []
    for slot, token in driver.sampled(plan[result.step - 1], result).items():
        out[slot].append(token)


@pytest.mark.parametrize("chunks", [[1] * 7, [2, 5], [3, 3, 1], [6, 1]])
@pytest.mark.parametrize("which", range(len(PARAMS)))
def test_chunked(expected: list[list[int]], chunks: list[int], which: int) -> None:
    driver = driver_of(new_runner("cuda"))
    driver.enter(3, PROMPT, PARAMS[which], seed=which)
    results = [driver.run({3: n}) for n in chunks]
    tokens = [unpack_ids(results[-1].sampled)[0]]
    tokens += [unpack_ids(driver.run({3: 1}).sampled)[0] for _ in range(N - 1)]
    assert tokens == expected[which]


@pytest.mark.parametrize("which", range(len(PARAMS)))
def test_resumed(expected: list[list[int]], which: int) -> None:
    driver = driver_of(new_runner("cuda"))
    prior = expected[which][:5]
    driver.enter(1, PROMPT + prior, PARAMS[which], seed=which, n_prompt=len(PROMPT))
    tokens = [unpack_ids(driver.run({1: driver.left(1)}).sampled)[0] for _ in range(N - 5)]
    assert tokens == expected[which][5:]


def test_scores_are_those_of_the_cpu(card_runner: Runner) -> None:
    results = []
    for runner in (card_runner, new_runner("cpu")):
        driver = driver_of(runner)
        driver.enter(0, PROMPT, PARAMS[-1])
        step = driver.plan({0: len(PROMPT)})
        results.append(driver.runner.execute(step._replace(base=0)))
    card, cpu = results
    for mine, theirs in zip(card.logprobs, cpu.logprobs, strict=True):
        assert (mine.key, mine.ids, mine.rank) == (theirs.key, theirs.ids, theirs.rank)
        close(mine.values, theirs.values)
    [mine], [theirs] = card.prompt_logprobs, cpu.prompt_logprobs
    assert (mine.ids, mine.ranks) == (theirs.ids, theirs.ranks)
    close(mine.values, theirs.values)


def close(mine: bytes, theirs: bytes) -> None:
    pair = (torch.frombuffer(bytearray(part), dtype=torch.float32) for part in (mine, theirs))
    torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4)


def test_forked_blocks(expected: list[list[int]]) -> None:
    """A copied block serves its copy."""
    driver = driver_of(new_runner("cuda"))
    driver.enter(0, PROMPT, GREEDY)
    driver.run({0: len(PROMPT)})
    copy = driver.free.pop()
    driver.copies = [driver.slots[0].blocks[0], copy]
    driver.enter(1, PROMPT, GREEDY, shared=[copy], computed=len(PROMPT) - 1)
    tokens = []
    for _ in range(N):
        step = driver.plan({1: 1})
        tokens.append(driver.sampled(step, driver.runner.execute(step))[1])
    assert tokens == expected[0]


def test_out_of_memory_passes_by_parts(
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagemesh.worker_svc.gpu.decoder import GPUDecoder

    whole = GPUDecoder.forward

    def small(self, token_ids, *rest):  # type: ignore[no-untyped-def]
        if len(token_ids) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(self, token_ids, *rest)

    driver = driver_of(new_runner("cuda"))
    monkeypatch.setattr(GPUDecoder, "forward", small)
    driver.enter(0, PROMPT, GREEDY)
    result = driver.run({0: len(PROMPT)})
    assert result.failed == []
    assert unpack_ids(result.sampled) == expected[0][:1]


def test_more_tokens_than_a_step_may_have(expected: list[list[int]]) -> None:
    """Rows that are too many together pass by parts; a prompt that is too long alone fails."""
    driver = driver_of(new_runner("cuda", num_blocks=200))
    for slot in range(3):
        driver.enter(slot, PROMPT * 20)
    driver.enter(3, PROMPT, PARAMS[0], seed=0)
    step = driver.plan({0: 140, 1: 140, 2: 140, 3: 7})
    result = driver.runner.execute(step)
    assert result.failed == []
    assert driver.sampled(step, result)[3] == expected[0][0]

"""A tiny decoder, and a scheduler without policy that keeps the books of the step protocol."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pagemesh.shared.engine_messages import NewRow, Step, StepResult
from pagemesh.shared.messages import Capacity, ModelCard
from pagemesh.shared.pooling import PoolingParams
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.wire import pack_ids, unpack_ids
from pagemesh.worker_svc.books import new_batch
from pagemesh.worker_svc.cpu_executor import CPUExecutor
from pagemesh.worker_svc.kv_cache import KVCache
from pagemesh.worker_svc.models.config import DecoderConfig
from pagemesh.worker_svc.models.decoder import Decoder
from pagemesh.worker_svc.runner import Runner
from pagemesh.worker_svc.step_model import StepModel

VOCAB = 97
BLOCK_TOKENS = 4
EOS = 5
GREEDY = SamplingParams(temperature=0.0)
CPU = torch.device("cpu")
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
CONFIG = DecoderConfig.from_dict(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
)


def tiny_decoder(seed: int = 0) -> Decoder:
    decoder = Decoder(CONFIG, dtype=torch.float32, device=CPU)
    generator = torch.Generator().manual_seed(seed)
    for weight in decoder.parameters():
        torch.nn.init.normal_(weight, std=0.3, generator=generator)
    return decoder


def tiny_runner(
    model: StepModel,
    *,
    num_blocks: int = 96,
    max_num_seqs: int = 8,
    max_model_len: int = 64,
    fill: float = 0.0,
    executor_type: type[CPUExecutor] = CPUExecutor,
) -> Runner:
    """`fill` is what the KV pool holds at first; NaN shows any read of what was never written."""
    kv = KVCache(CONFIG, num_blocks, BLOCK_TOKENS, torch.float32, CPU)
    for layer in (*kv.k, *kv.v):
        layer[1:] = fill
    card = ModelCard(["tiny"], VOCAB, max_model_len, BLOCK_TOKENS, "float32", [EOS], 1, "f", 0)
    capacity = Capacity(num_blocks, max_num_seqs, 64, 512, "cpu")
    batch = new_batch(card, capacity)
    executor = executor_type(model, kv, batch, vocab_tokens=VOCAB, eos_token_ids=[EOS])
    return Runner(executor, batch, card, capacity)


@dataclass
class Booked:
    """What the scheduler's side knows of a slot: counts and blocks, no tokens."""

    known: int
    computed: int
    blocks: list[int]


@dataclass
class Driver:
    runner: Runner
    epoch: int = 1
    last_step: int = 0
    block_tokens: int = BLOCK_TOKENS
    slots: dict[int, Booked] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    _gone: list[int] = field(default_factory=list)
    _new: list[NewRow] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    _decoding: list[int] = field(default_factory=list)
    rows: dict[int, list[int]] = field(default_factory=dict)
    """Slots of each step's rows, in order, by step."""

    def __post_init__(self) -> None:
        self.free = list(range(1, self.runner.capacity.num_blocks))

    def enter(
        self,
        slot: int,
        ids: list[int],
        params: SamplingParams = GREEDY,
        *,
        n_prompt: int | None = None,
        seed: int = 0,
        shared: list[int] | None = None,
        computed: int = 0,
        pooling: PoolingParams | None = None,
    ) -> None:
        """`shared` blocks already hold the first `computed` tokens."""
        blocks = [*(shared or [])]
        while len(blocks) * self.block_tokens < len(ids):
            blocks.append(self.free.pop())
        self.slots[slot] = Booked(len(ids), computed, blocks)
        n_prompt = len(ids) if n_prompt is None else n_prompt
        packed_ids, packed_blocks = pack_ids(ids), pack_ids(blocks)
        name = f"request-{len(self.slots)}"
        self._new.append(
            NewRow(slot, packed_ids, n_prompt, seed, params, packed_blocks, computed, name, pooling)
        )

    def leave(self, slot: int, *, keep_blocks: bool = False) -> list[int]:
        blocks = self.slots.pop(slot).blocks
        self._gone.append(slot)
        if not keep_blocks:
            self.free.extend(blocks)
        return blocks

    def plan(self, work: dict[int, int]) -> Step:
        """The frame that computes `work` (slot → tokens). Counts advance now, as in run-ahead."""
        stayed = [slot for slot in self._decoding if slot not in self._gone]
        decoding = [slot for slot in stayed if work.get(slot) == 1]
        joined = [slot for slot, n in work.items() if n == 1 and slot not in decoding]
        chunks = [slot for slot, n in work.items() if n != 1]
        self._decoding = decoding + joined
        order = self._decoding + chunks
        step = Step(
            epoch=self.epoch,
            step=self.last_step + 1,
            base=self.last_step,
            n_rows=len(work),
            n_tokens=sum(work.values()),
            gone=pack_ids(self._gone),
            new=self._new,
            grown=pack_ids([n for slot in order for n in self._grow(slot, work[slot])]),
            copies=pack_ids(self.copies),
            paused=pack_ids([slot for slot in stayed if slot not in decoding]),
            joined=pack_ids(joined),
            chunks=pack_ids([n for slot in chunks for n in (slot, work[slot])]),
        )
        self._gone, self._new, self.copies = [], [], []
        self.last_step += 1
        self.rows[step.step] = order
        return step

    def _grow(self, slot: int, n_tokens: int) -> tuple[int, ...]:
        """The slot and its new block, if it needs one."""
        booked = self.slots[slot]
        booked.computed += n_tokens
        booked.known += booked.computed == booked.known
        if len(booked.blocks) * self.block_tokens >= booked.computed:
            return ()
        booked.blocks.append(self.free.pop())
        return (slot, booked.blocks[-1])

    def run(self, work: dict[int, int]) -> StepResult:
        return self.runner.execute(self.plan(work))

    def left(self, slot: int) -> int:
        return self.slots[slot].known - self.slots[slot].computed

    def sampled(self, step: Step, result: StepResult) -> dict[int, int]:
        """slot → sampled token."""
        pairs = zip(self.rows[step.step], unpack_ids(result.sampled), strict=True)
        return {slot: token for slot, token in pairs if token >= 0}


def alone(
    model: StepModel,
    ids: list[int],
    params: SamplingParams,
    n: int,
    *,
    seed: int = 0,
    n_prompt: int | None = None,
) -> list[int]:
    """`n` tokens of a request with a worker of its own, its prompt in one step."""
    driver = Driver(tiny_runner(model))
    driver.enter(0, ids, params, seed=seed, n_prompt=n_prompt)
    return [unpack_ids(driver.run({0: driver.left(0)}).sampled)[0] for _ in range(n)]


def steps(driver: Driver, slot: int, n: int) -> list[int]:
    """`n` tokens of a slot whose prompt is computed, one step each."""
    return [unpack_ids(driver.run({slot: 1}).sampled)[0] for _ in range(n)]


def floats(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, "<f4").copy())

"""A worker's dry run where there is no card, in a process of its own that is not the interpreter's:
launches are noted for a card of compute capability 9.0, and none is made. Prints what it found."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

sys.path.append(str(Path(__file__).parents[1] / "worker"))
from worker_harness import Driver

from pagemesh.kernels.gpu.compile_ahead import Note, compile_ahead, noted_launches
from pagemesh.shared.messages import Capacity, ModelCard
from pagemesh.shared.sampling import SamplingParams
from pagemesh.worker_svc.books import new_batch
from pagemesh.worker_svc.gpu import decode_rows, staging, step_words
from pagemesh.worker_svc.gpu import executor as executor_module
from pagemesh.worker_svc.gpu.decoder import GPUDecoder
from pagemesh.worker_svc.gpu.executor import GPUExecutor
from pagemesh.worker_svc.gpu.rehearsal import dry_run
from pagemesh.worker_svc.kv_cache import KVCache
from pagemesh.worker_svc.models.config import DecoderConfig
from pagemesh.worker_svc.models.decoder import Decoder
from pagemesh.worker_svc.runner import Runner

VOCAB, MAX_NUM_SEQS, STEP_TOKENS, MAX_MODEL_LEN = 1024, 64, 512, 2048
CONFIG = DecoderConfig.from_dict(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 64,
        "max_window_layers": 1,
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": MAX_MODEL_LEN,
    }
)
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, min_tokens=3),
    SamplingParams(temperature=0.9, top_p=0.8),
    SamplingParams(temperature=0.8, min_p=0.1, logit_bias={3: 1.0}),
    SamplingParams(temperature=0.8, logprobs=3),
    SamplingParams(temperature=0.8, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, prompt_logprobs=2),
]
N_COMPILED = 8


class Hopper:
    """As much of a driver as compiling needs."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class NoCopies:
    """CopyOut of results that are never computed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        return list(tensors), self.fence

    def fence(self) -> None:
        """Nothing is under way."""


def act_out_a_card() -> None:
    driver.set_active(Hopper())
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132)
    torch.cuda.graph_pool_handle = lambda: (0, 0)
    staging.pinned = step_words.pinned = decode_rows.pinned = plain_words
    executor_module.CopyOut = NoCopies
    torch.set_num_threads(1)


def plain_words(n_words: int) -> tuple[Tensor, staging.Words]:
    tensor = torch.empty(n_words, dtype=torch.int32)
    return tensor, tensor.numpy()


def new_runner(num_blocks: int, *, excerpt: bool = False) -> tuple[Runner, GPUExecutor]:
    dtype = torch.bfloat16
    kv = KVCache(CONFIG, num_blocks, 16, dtype, torch.device("cpu"))
    card = ModelCard(["tiny"], VOCAB, MAX_MODEL_LEN, 16, "bfloat16", [5], 1, "f", 0)
    capacity = Capacity(num_blocks, MAX_NUM_SEQS, STEP_TOKENS, 512, "cpu")
    batch = new_batch(card, capacity)
    decoder = Decoder(CONFIG, dtype=dtype, device="cpu")
    for weight in decoder.parameters():
        weight.zero_()
    model = GPUDecoder(decoder, MAX_MODEL_LEN)
    executor = GPUExecutor(
        model.excerpt() if excerpt else model,
        kv,
        batch,
        vocab_tokens=VOCAB,
        eos_token_ids=[5],
        max_step_tokens=STEP_TOKENS,
        eager=True,
    )
    return Runner(executor, batch, card, capacity), executor


def run_at_random(runner: Runner, rng: random.Random, epoch: int) -> None:
    """A step of prompts of many lengths and kinds, and two of decodes."""
    runner.reset()
    driver = Driver(runner, block_tokens=16, epoch=epoch)
    kinds = rng.choices(PARAMS, k=rng.randint(1, len(PARAMS)))
    work, left = dict[int, int](), STEP_TOKENS
    for slot in rng.sample(range(MAX_NUM_SEQS), rng.choice([1, 2, 15, 16, 40, MAX_NUM_SEQS])):
        n_tokens = min(left, rng.choice([1, 2, 7, 16, 33, 100, 257]))
        if n_tokens:
            driver.enter(slot, [1] * n_tokens, rng.choice(kinds), seed=slot)
            work[slot], left = n_tokens, left - n_tokens
    runner.launch(driver.plan(work)).wait()
    for _ in range(2):
        runner.launch(driver.plan(dict.fromkeys(work, 1))).wait()


def compiled_twice(notes: list[Note]) -> list[bool]:
    """For each time that each of `notes` is compiled, whether it was on disk."""
    hits = list[bool]()
    knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    compile_ahead(notes, 8)
    for note in notes:  # as another process would
        note.kernel.device_caches.clear()
    compile_ahead(notes, 8)
    return hits


def is_at_hand(note: Note) -> bool:
    """Whether a launch would find it."""
    compiled, *_ = note.kernel.device_caches[0]
    return json.loads(note.specialization)["key"] in compiled


def main() -> None:
    act_out_a_card()
    with noted_launches() as rehearsed:
        dry_run(*new_runner(num_blocks=2, excerpt=True))
    runner, _ = new_runner(num_blocks=400)
    rng = random.Random(0)
    with noted_launches() as later:
        for epoch in range(1, 26):
            run_at_random(runner, rng, epoch)
    few = sorted(rehearsed, key=lambda note: len(note.specialization))[:N_COMPILED]
    hits = compiled_twice(few)
    print(
        json.dumps(
            {
                "rehearsed": sorted({note.kernel.fn.__name__ for note in rehearsed}),
                "new_later": [note.specialization for note in later if note not in rehearsed],
                "hits": hits,
                "at_hand": [is_at_hand(note) for note in few],
            }
        )
    )


if __name__ == "__main__":
    main()

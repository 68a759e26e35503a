"""The GPU's executor on any machine: without a card its kernels run in Triton's interpreter and its
streams and graphs are acted out. On a card only staged writes are watched."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "worker"))
from tiny_grammars import tiny_grammars
from worker_harness import Driver

from pagemesh.kernels.activation import silu_mul
from pagemesh.kernels.attention import paged_attention
from pagemesh.kernels.batch import WRITE_WORDS, BatchState
from pagemesh.kernels.norm import add_rms_norm
from pagemesh.kernels.rope_store import rope_store
from pagemesh.shared.messages import Capacity, ModelCard
from pagemesh.worker_svc.books import new_batch
from pagemesh.worker_svc.cpu_executor import CPUExecutor
from pagemesh.worker_svc.gpu import decode_rows, ruled_rows, staging, step_words
from pagemesh.worker_svc.gpu import decoder as decoder_module
from pagemesh.worker_svc.gpu import executor as executor_module
from pagemesh.worker_svc.gpu.decoder import GPUDecoder
from pagemesh.worker_svc.gpu.executor import GPUExecutor
from pagemesh.worker_svc.gpu.graphs import StepGraphs
from pagemesh.worker_svc.kv_cache import KVCache
from pagemesh.worker_svc.models.config import DecoderConfig
from pagemesh.worker_svc.models.decoder import Decoder
from pagemesh.worker_svc.runner import Runner

VOCAB, BLOCK_TOKENS, EOS = 97, 16, 5
MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_STEP_TOKENS = 64, 8, 100
CONFIG = DecoderConfig.from_dict(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
)


class LateCopies:
    """CopyOut of a device that copies as late as it may."""

    def __init__(self, device: torch.device) -> None:
        self._due: list[list[tuple[Tensor, Tensor]]] = []

    def start(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        copies = [torch.full_like(tensor, 77) for tensor in tensors]
        job = list(zip(copies, tensors, strict=True))
        self._due.append(job)
        return copies, lambda: self._finish(job)

    def fence(self) -> None:
        for job in self._due:
            self._finish(job)
        self._due.clear()

    @staticmethod
    def _finish(job: list[tuple[Tensor, Tensor]]) -> None:
        while job:
            copy, source = job.pop()
            copy.copy_(source)


class ActedGraphs(StepGraphs):
    """Launch again what a graph would replay."""

    def replay(self, size: int) -> None:
        assert size in self._graphs
        self._launch(size)

    def capture(self, size: int) -> None:
        self._launch_padding(size)
        self._graphs[size] = None  # type: ignore[assignment]


def act_out(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Act out what the machine lacks of a device, and watch staged writes."""
    scatter = staging.scatter_writes

    def checked(words: Tensor, n_writes: int, state: BatchState) -> None:
        header = words[: n_writes * WRITE_WORDS].view(-1, WRITE_WORDS).tolist()
        spans = sorted((field, first, first + n) for field, first, _, n in header if n)
        for (field, _, end), (other, start, _) in pairwise(spans):
            assert field != other or end <= start, "two staged writes race for a place"
        scatter(words, n_writes, state)

    monkeypatch.setattr(staging, "scatter_writes", checked)
    monkeypatch.setattr(executor_module, "_SHORT_TOKENS", 24)  # so that some rows are longer
    if device == "cpu":

        def plain(n_words: int) -> tuple[Tensor, staging.Words]:
            tensor = torch.empty(n_words, dtype=torch.int32)
            return tensor, tensor.numpy()

        for module in (staging, step_words, decode_rows, ruled_rows):
            monkeypatch.setattr(module, "pinned", plain)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
        monkeypatch.setattr(executor_module, "CopyOut", LateCopies)
        monkeypatch.setattr(executor_module, "StepGraphs", ActedGraphs)
        for kernel in (paged_attention, rope_store, add_rms_norm, silu_mul):
            # Other tests hold these against each other, and the interpreter takes its time.
            monkeypatch.setattr(decoder_module, kernel.__name__, kernel)
    else:
        torch.cuda.set_stream(torch.cuda.Stream())


def tiny_decoder(device: str) -> Decoder:
    decoder = Decoder(CONFIG, dtype=torch.float32, device="cpu")
    rng = torch.Generator().manual_seed(0)
    for weight in decoder.parameters():
        torch.nn.init.normal_(weight, std=0.3, generator=rng)
    return decoder.to(device)


def new_driver(device: str, *, cpu: bool = False, eager: bool = False) -> Driver:
    """`cpu`: with the CPU's executor, which says what is right."""
    num_blocks = 80
    kv = KVCache(CONFIG, num_blocks, BLOCK_TOKENS, torch.float32, device)
    for layer in (*kv.k, *kv.v):
        layer[1:] = torch.nan
    card = ModelCard(["tiny"], VOCAB, MAX_MODEL_LEN, BLOCK_TOKENS, "float32", [EOS], 1, "f", 0)
    capacity = Capacity(num_blocks, MAX_NUM_SEQS, MAX_STEP_TOKENS, 512, device)
    batch, names = new_batch(card, capacity), {"vocab_tokens": VOCAB, "eos_token_ids": [EOS]}
    grammars = tiny_grammars(VOCAB, EOS)
    decoder = tiny_decoder(device)
    executor: CPUExecutor | GPUExecutor
    if cpu:
        executor = CPUExecutor(decoder, kv, batch, **names, grammars=grammars)
    else:
        executor = GPUExecutor(
            GPUDecoder(decoder, MAX_MODEL_LEN),
            kv,
            batch,
            **names,
            max_step_tokens=MAX_STEP_TOKENS,
            eager=eager,
            grammars=grammars,
        )
        executor.capture()
    return Driver(Runner(executor, batch, card, capacity), block_tokens=BLOCK_TOKENS)

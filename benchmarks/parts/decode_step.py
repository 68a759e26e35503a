"""A decode step of the worker's own decoder on random weights and pages, in a CUDA graph."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import Tensor

from pagemesh.kernels.batch import ROW_WORDS, BatchState, StepBuffers
from pagemesh.kernels.gpu.batch import gather_rows
from pagemesh.kernels.gpu.row_params import ROW_WORDS as PARAM_WORDS
from pagemesh.kernels.inputs import AttentionInputs
from pagemesh.worker_svc.gpu import decoder as gpu_decoder
from pagemesh.worker_svc.gpu.decoder import GPUDecoder
from pagemesh.worker_svc.kv_cache import KVCache
from pagemesh.worker_svc.models.config import DecoderConfig
from pagemesh.worker_svc.models.decoder import Decoder
from parts.step_choices import DTYPE, Choices, Mode, Shape, applied

BLOCK_TOKENS = 16
MAX_MODEL_LEN = 8448
_POOL_SHARE = 2
"""Pages of the pool for each page in use: those in use lie scattered."""


@dataclass(frozen=True)
class DecodeStep:
    shape: Shape
    model: GPUDecoder
    kv: KVCache
    state: BatchState
    buffers: StepBuffers
    first: Tensor
    """int32[R, 4]: see `gather_rows`, which may change what it is given."""
    rows: Tensor
    logits: Tensor

    @classmethod
    def random(cls, shape: Shape, max_rows: int, context: int, device: torch.device) -> DecodeStep:
        """Of up to `max_rows` sequences of `context` tokens, the last of which is computed; on
        the device `meta` without contents."""
        config, blocks = shape.config, -(-MAX_MODEL_LEN // BLOCK_TOKENS)
        first = _ints(device, max_rows, ROW_WORDS)
        first[:, 0] = first[:, 3] = torch.arange(max_rows, device=device)
        first[:, 1], first[:, 2] = context - 1, 1
        used = -(-context // BLOCK_TOKENS)
        pages = max_rows * used * _POOL_SHARE
        return cls(
            shape=shape,
            model=_model(shape, device),
            kv=_random_pages(config, pages, device),
            state=BatchState(
                token_ids=torch.randint(
                    config.vocab_size, (max_rows, MAX_MODEL_LEN), dtype=torch.int32, device=device
                ),
                tables=_scattered_tables(max_rows, blocks, used, pages, device),
                params=_ints(device, max_rows, PARAM_WORDS),
            ),
            buffers=StepBuffers.empty(max_rows, max_rows, blocks, device),
            first=first,
            rows=first.clone(),
            logits=torch.empty(max_rows, config.vocab_size, dtype=DTYPE, device=device),
        )

    def launch(
        self,
        rows: int,
        choices: Choices,
        skip: frozenset[str] = frozenset(),
        mode: Mode = "launch",
    ) -> None:
        """What a graph of the executor does, with `choices` and without `skip`."""
        with applied(self.shape, choices, skip, mode):
            self._launch(rows)

    def _launch(self, rows: int) -> None:
        buffers = self.buffers.part(rows, rows)
        # By a kernel: the next one depends on it as it does on those of the worker.
        torch.add(self.first[:rows], 0, out=self.rows[:rows])
        gather_rows(self.rows[:rows], self.state, BLOCK_TOKENS, buffers)
        inputs = AttentionInputs(
            query_start=buffers.query_start,
            seq_lens=buffers.seq_lens,
            block_tables=buffers.block_tables,
            slot_mapping=buffers.slot_mapping,
            max_query_tokens=1,
            max_seq_tokens=MAX_MODEL_LEN,
            n_decode=rows,
        )
        hidden = self.model.forward(buffers.token_ids, buffers.positions, inputs, self.kv)
        self.model.logits(hidden, out=self.logits[:rows])

    def capture(
        self, rows: int, choices: Choices, skip: frozenset[str] = frozenset()
    ) -> torch.cuda.CUDAGraph:
        """Raises whatever a launch raises, before anything is captured."""
        self.launch(rows, choices, skip)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            self.launch(rows, choices, skip)
        return graph


def one_layer(shape: Shape) -> Shape:
    """With every kernel of the whole model, for what is only compiled."""
    windows = shape.config.windows[:1]
    return Shape(replace(shape.config, n_layers=1, windows=windows))


def _ints(device: torch.device, *size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int32, device=device)


def _scattered_tables(
    rows: int, blocks: int, used: int, pages: int, device: torch.device
) -> Tensor:
    """Each row's first `used` blocks are pages of its own, anywhere behind the null page."""
    tables = _ints(device, rows, blocks)
    scattered = torch.randperm(pages, device=device)[: rows * used] + 1
    tables[:, :used] = scattered.view(rows, used).to(torch.int32)
    return tables


def _random_pages(config: DecoderConfig, pages: int, device: torch.device) -> KVCache:
    """Behind the null page."""
    kv = KVCache(config, pages + 1, BLOCK_TOKENS, DTYPE, device)
    for layer in kv.pool[:, :, 1:]:
        layer.normal_()
    return kv


def _model(shape: Shape, device: torch.device) -> GPUDecoder:
    if device.type != "meta":
        decoder = Decoder(shape.config, dtype=DTYPE, device=device)
        for weight in decoder.parameters():
            _fill(weight)
        return GPUDecoder(decoder, MAX_MODEL_LEN)
    rotations = torch.empty(MAX_MODEL_LEN + 1, shape.config.head_dim, device=device)
    with patch.object(gpu_decoder, "_rotations", lambda *_: rotations):
        return GPUDecoder(Decoder(shape.config, dtype=DTYPE, device=device), MAX_MODEL_LEN)


def _fill(weight: Tensor) -> None:
    """Such that values stay about 1."""
    with torch.no_grad():
        if weight.ndim == 1:
            weight.fill_(1)
        else:
            weight.normal_(std=1 / math.sqrt(weight.shape[1]))

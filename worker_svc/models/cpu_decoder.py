"""A decoder compiled for the CPU: the same model, as a program of the CPU's kernels."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemesh.kernels.cpu import matmul
from pagemesh.kernels.cpu.attention import query_tokens
from pagemesh.kernels.cpu.attention import scratch_elements as attention_scratch
from pagemesh.kernels.cpu.memory import zeros
from pagemesh.kernels.cpu.program import Dims, Pages, Rows, Space, run
from pagemesh.kernels.cpu.sync import Steps
from pagemesh.kernels.cpu.team import Team
from pagemesh.kernels.cpu.work import attention_work
from pagemesh.kernels.inputs import AttentionInputs
from pagemesh.worker_svc.kv_cache import KVCache
from pagemesh.worker_svc.models.config import DecoderConfig
from pagemesh.worker_svc.models.decoder import Decoder
from pagemesh.worker_svc.models.packing import as_bits
from pagemesh.worker_svc.models.program_builder import Region, placed, plan_of

_FEWEST_ROWS: Final = 64
_LINE_ELEMENTS: Final = 16


class CPUDecoder:
    """A StepModel. Takes the weights of `decoder` over: their tensors are empty afterwards.

    Matrices are kept as `dtype`, or as int8; activations and sums are float32. What `forward` and
    `logits` return is overwritten by the next call. Bits do not depend on the batch: a token's
    result is the same alone, in a batch, in one chunk or another.
    """

    def __init__(self, decoder: Decoder, team: Team, *, dtype: torch.dtype) -> None:
        self.config = decoder.config
        self._team = team
        self._plan, self._weights = plan_of(decoder, dtype)
        config = decoder.config
        self._dims = Dims(
            hidden_size=config.hidden_size,
            n_heads=config.n_heads,
            n_kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=np.float32(config.rms_norm_eps),
            attention_scale=np.float32(config.head_dim**-0.5),
            rotary_factor=np.float32(decoder.rotary.attention_factor),
            inputs_at_once=self._plan.inputs_at_once,
        )
        self._steps = Steps(len(self._plan.body))
        self._logits = zeros(0, np.float32)
        self._scratch = zeros(team.n_threads * _scratch_elements(config), np.float32)
        self._no_rows = _no_rows()
        self._no_pages = Pages(as_bits(torch.empty(0, dtype=decoder.embedding.dtype)), 0, 1)
        self._capacity_rows = 0
        self._reserve(_FEWEST_ROWS)

    @property
    def weights_bytes(self) -> int:
        return sum(array.nbytes for array in self._weights)

    def forward(
        self, token_ids: Tensor, positions: Tensor, inputs: AttentionInputs, kv: KVCache
    ) -> Tensor:
        """float32 [T, H]: the final hidden states of int64[T] token ids; stores their K and V."""
        self._reserve(len(token_ids))
        rows = Rows(
            token_ids.numpy(),
            positions.numpy(),
            inputs.slot_mapping.numpy(),
            inputs.block_tables.numpy(),
            self._work(inputs),
        )
        pages = Pages(as_bits(kv.pool).reshape(-1), kv.num_blocks, kv.block_tokens)
        self._launch(self._body, len(token_ids), pages, rows)
        return self._region(self._plan.final, len(token_ids))

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [R, vocab] of hidden states [R, H]."""
        n, vocab_tokens = len(hidden), self.config.vocab_size
        self._reserve(n)
        if len(self._logits) < n * vocab_tokens:
            self._logits = zeros(n * vocab_tokens, np.float32)
        self._region(self._plan.picked, n).copy_(hidden)
        self._launch(self._head, n, self._no_pages, self._no_rows)
        return torch.from_numpy(self._logits[: n * vocab_tokens]).view(n, vocab_tokens)

    def _launch(self, ops: NDArray[np.void], n_rows: int, pages: Pages, rows: Rows) -> None:
        space = Space(self._buffers, self._logits, self._scratch)
        n_threads, words, tag = self._team.n_threads, self._steps.words, self._steps.open(len(ops))
        dims, weights = self._dims, self._weights
        self._team.run(
            lambda rank: run(
                rank, n_threads, tag, words, ops, n_rows, dims, weights, pages, rows, space
            )
        )

    def _work(self, inputs: AttentionInputs) -> NDArray[np.int64]:
        """The attention's items."""
        starts, lens = inputs.query_start.numpy(), inputs.seq_lens.numpy()
        most = query_tokens(self.config.n_heads // self.config.n_kv_heads)
        work = np.empty((len(lens) + int(starts[-1]) // most, 4), np.int64)
        return work[: attention_work(starts, lens, most, work)]

    def _reserve(self, rows: int) -> None:
        """Room for `rows` rows in the buffers: the program is laid out anew when they grow."""
        if rows <= self._capacity_rows:
            return
        capacity_rows = max(rows, 2 * self._capacity_rows, _FEWEST_ROWS)
        # Zeros: the padding of each region is read and must be finite. Nothing changes if it fails.
        self._buffers = zeros(capacity_rows * self._plan.row_elements, np.float32)
        self._body = placed(self._plan.body, capacity_rows)
        self._head = placed(self._plan.head, capacity_rows)
        self._capacity_rows = capacity_rows

    def _region(self, region: Region, rows: int) -> Tensor:
        first = region.column * self._capacity_rows
        part = self._buffers[first : first + rows * region.width].reshape(rows, region.width)
        return torch.from_numpy(part)[:, : self.config.hidden_size]


def _scratch_elements(config: DecoderConfig) -> int:
    """float32 that one thread needs, in whole cache lines."""
    group = config.n_heads // config.n_kv_heads
    most = max(matmul.SCRATCH_ELEMENTS, attention_scratch(group, config.head_dim))
    return -(-most // _LINE_ELEMENTS) * _LINE_ELEMENTS


def _no_rows() -> Rows:
    ints = np.empty(0, np.int64)
    return Rows(ints, ints, ints, np.empty((0, 0), np.int32), np.empty((0, 4), np.int64))

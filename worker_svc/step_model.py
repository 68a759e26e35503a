"""What the runner asks of a model; `models.cpu_decoder.CPUDecoder` is one, and so is the
reference, `models.decoder.Decoder`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pagemesh.kernels.inputs import AttentionInputs
from pagemesh.worker_svc.kv_cache import KVCache


class StepModel(Protocol):
    def forward(
        self, token_ids: Tensor, positions: Tensor, inputs: AttentionInputs, kv: KVCache
    ) -> Tensor:
        """The final hidden states [T, H] of int64[T] token ids; stores their K and V in `kv`.

        Valid until the next call."""

    def logits(self, hidden: Tensor) -> Tensor:
        """float32[R, vocab] of hidden states [R, H]. The caller may overwrite it; valid until the
        next call."""

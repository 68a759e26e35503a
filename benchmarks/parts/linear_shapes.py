"""The linear layers of a decoder, as a decode step computes them."""

from __future__ import annotations

from dataclasses import dataclass

from pagemesh.worker_svc.models.config import DecoderConfig


@dataclass(frozen=True)
class Linear:
    """w [n, k]; of a gated one `n` counts gate and up."""

    name: str
    n: int
    k: int
    gated: bool = False
    max_splits: int = 8
    """Of K: 1 where whoever reads the result wants whole sums."""


def linears_of(config: DecoderConfig) -> list[Linear]:
    """Those of one layer, in order, then the head."""
    hidden, inner = config.hidden_size, config.intermediate_size
    attended = config.n_heads * config.head_dim
    return [
        Linear("qkv", attended + 2 * config.n_kv_heads * config.head_dim, hidden),
        Linear("o", hidden, attended),
        Linear("gate_up", 2 * inner, hidden, gated=True, max_splits=1),
        Linear("down", hidden, inner),
        Linear("head", config.vocab_size, hidden, max_splits=1),
    ]

"""All linear layers of a decoder and its head through cuBLAS, in one CUDA graph: what a machine
gives to the weights of a step, with nothing between them."""

from __future__ import annotations

import statistics
from typing import NamedTuple

import torch
from torch import Tensor

from pagemesh.worker_svc.models.config import DecoderConfig

_REPLAYS = 20


class Product(NamedTuple):
    """w [N, K] times the rows of a step, [T, K]."""

    w: Tensor
    x: Tensor


def linear_layers_ms(config: DecoderConfig, rows: list[int]) -> dict[int, float]:
    """Milliseconds by number of rows, in bfloat16 on random weights: the median over replays. Takes
    the memory of the model's weights, and gives it back."""
    weights = _weights(config)
    times = {n: _replayed_ms([Product(w, _random(n, w.shape[1])) for w in weights]) for n in rows}
    weights.clear()
    torch.cuda.empty_cache()
    return times


def _weights(config: DecoderConfig) -> list[Tensor]:
    """Of every layer its own, as they are read from memory in a step: QKV and gate and up are one
    matrix each."""
    hidden, inner, attended = (
        config.hidden_size,
        config.intermediate_size,
        config.n_heads * config.head_dim,
    )
    qkv = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
    layer = ((qkv, hidden), (hidden, attended), (2 * inner, hidden), (hidden, inner))
    shapes = [*layer * config.n_layers, (config.vocab_size, hidden)]
    return [_random(*shape) for shape in shapes]


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda") * 0.02


def _replayed_ms(products: list[Product]) -> float:
    def run() -> None:
        for w, x in products:
            torch.mm(x, w.T)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return statistics.median([_once_ms(graph) for _ in range(_REPLAYS)][2:])


def _once_ms(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)

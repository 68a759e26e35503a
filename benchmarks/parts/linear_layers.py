"""All linear layers of a decoder and its head through cuBLAS, in one CUDA graph: what a machine
gives to the weights of a step, with nothing between them."""

from __future__ import annotations

import torch
from torch import Tensor

from pagemesh.worker_svc.models.config import DecoderConfig
from parts.card_clock import graph_us
from parts.linear_shapes import linears_of

_REPLAYS = 18


def linear_layers_ms(config: DecoderConfig, rows: list[int]) -> dict[int, float]:
    """Milliseconds by number of rows, in bfloat16 on random weights: the median over replays. Takes
    the memory of the model's weights, and gives it back."""
    weights = _weights(config)
    times = {n: _products_ms(weights, n) for n in rows}
    weights.clear()
    torch.cuda.empty_cache()
    return times


def _weights(config: DecoderConfig) -> list[Tensor]:
    """Of every layer its own, as they are read from memory in a step."""
    *layer, head = linears_of(config)
    return [_random(each.n, each.k) for each in [*layer * config.n_layers, head]]


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda") * 0.02


def _products_ms(weights: list[Tensor], rows: int) -> float:
    inputs = [_random(rows, w.shape[1]) for w in weights]

    def work() -> None:
        for x, w in zip(inputs, weights, strict=True):
            torch.mm(x, w.T)

    return graph_us(work, _REPLAYS) / 1e3

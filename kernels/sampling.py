"""Choosing one token per row: greedy, or Gumbel-max under temperature, min_p, top_k and top_p.

The three filters are one threshold on a row's scaled logits, so equal logits stay or fall together
and no result depends on the order in which a sort leaves them:
- min_p keeps tokens at least min_p times as probable as the best one;
- top_k keeps tokens no worse than the k-th best;
- top_p, on what those two left, keeps a token while the tokens strictly better than it hold less
  than the fraction top_p of the probability.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from pagemesh.kernels.noise import gumbel
from pagemesh.kernels.search import argmax, largest, where

WINDOW: Final = 1024
# Logits whose noise is made at once: temporaries of this size stay in a core's cache.
_NOISE_ELEMENTS: Final = 2**17


class Filters(NamedTuple):
    """Per row: top_k int[R] (0 = off), top_p float32[R] (1 = off), log_min_p float32[R] (-inf =
    off)."""

    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor

    def rows(self, index: Tensor) -> Filters:
        return Filters(self.top_k[index], self.top_p[index], self.log_min_p[index])


def sample(scaled: Tensor, keys: Tensor) -> Tensor:
    """int64[R] ids drawn from softmax(scaled), float32[R, V], by the noise of int64[R] keys."""
    vocab_tokens = scaled.shape[1]
    vocabulary = torch.arange(vocab_tokens, dtype=torch.int32, device=scaled.device)
    rows = max(1, _NOISE_ELEMENTS // vocab_tokens)
    parts = zip(torch.split(scaled, rows), torch.split(keys.unsqueeze(1), rows), strict=True)
    return torch.cat([argmax(gumbel(key, vocabulary).add_(part)) for part, key in parts])


def sample_filtered(scaled: Tensor, keys: Tensor, filters: Filters) -> Tensor:
    """int64[R] ids drawn from the filtered softmax of float32[R, V] scaled logits.

    Noise is made for the kept tokens only.
    """
    kept = scaled >= thresholds(scaled, filters).unsqueeze(1)
    rows, ids = where(kept)
    noisy = scaled[rows, ids] + gumbel(keys[rows], ids.to(torch.int32))
    best = noisy.new_full((len(scaled),), -torch.inf).scatter_reduce_(0, rows, noisy, "amax")
    winning = noisy == best[rows]
    tokens = ids.new_full((len(scaled),), scaled.shape[1])
    return tokens.scatter_reduce_(0, rows[winning], ids[winning], "amin")


def thresholds(scaled: Tensor, filters: Filters, window: int = WINDOW) -> Tensor:
    """The smallest kept value of each row of float32[R, V], float32[R].

    Sorts the best `window` tokens of each row. Rows whose filters may keep more are sorted whole.
    The window never changes the result.
    """
    window = min(window, scaled.shape[1])
    threshold, found = _find(scaled, largest(scaled, window), filters)
    if not found.all():
        rest = (~found).nonzero().squeeze(1)
        threshold[rest] = thresholds(scaled[rest], filters.rows(rest), scaled.shape[1])
    return threshold


def _find(scaled: Tensor, values: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """Threshold of each row, float32[R], and whether it is certain, bool[R], from the W best values
    of each row, float32[R, W], best first."""
    window, vocab_tokens = values.shape[1], scaled.shape[1]
    top_k = filters.top_k.to(torch.int64).masked_fill(filters.top_k >= vocab_tokens, 0)
    floor = torch.maximum(values[:, 0] + filters.log_min_p, _top_k_floor(values, top_k))
    threshold = _top_p_threshold(scaled, values, floor, filters.top_p)
    last = values[:, -1]
    reached = (last < threshold) & (top_k <= window)
    return threshold, reached | last.isneginf() | (window == vocab_tokens)


def _top_k_floor(values: Tensor, top_k: Tensor) -> Tensor:
    kth = values.gather(1, (top_k.clamp(1, values.shape[1]) - 1).unsqueeze(1)).squeeze(1)
    return kth.masked_fill(top_k == 0, -torch.inf)


def _top_p_threshold(scaled: Tensor, values: Tensor, floor: Tensor, top_p: Tensor) -> Tensor:
    """Sums in float64: a long tail of small probabilities would drown in float32."""
    if (top_p >= 1).all():
        return floor
    best = values[:, :1]
    weights = (values - best).exp_().masked_fill_(values < floor.unsqueeze(1), 0.0)
    better = torch.zeros_like(weights, dtype=torch.float64)
    torch.cumsum(weights[:, :-1], dim=1, dtype=torch.float64, out=better[:, 1:])
    total = better[:, -1] + weights[:, -1]
    beyond = (top_p < 1) & (weights[:, -1] > 0)
    if values.shape[1] < scaled.shape[1] and beyond.any():
        total[beyond] = _mass_above(scaled[beyond], best[beyond], floor[beyond])
    kept = torch.searchsorted(better, (top_p * total).unsqueeze(1))
    nucleus = values.gather(1, (kept - 1).clamp_(min=0)).squeeze(1)
    return torch.where(top_p < 1, nucleus, floor)


def _mass_above(scaled: Tensor, best: Tensor, floor: Tensor) -> Tensor:
    """float64[R]: the sum of exp(scaled - best) over each row's values of at least `floor`."""
    weights = (scaled - best).exp_().masked_fill_(scaled < floor.unsqueeze(1), 0.0)
    return weights.sum(dim=1).to(torch.float64)
